"""Stop strings: where a response ends in tokens and in text, also when an interruption splits the stop string."""

from dataclasses import replace

import pytest

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import EngineError
from megagrpo.engine.responses import Ending, find_ending
from megagrpo.types import Thinking
from tests.unit.engine.test_async_client import PROMPT, SAMPLING, choice, scripted
from tests.unit.for_each import for_each

WORDS = ["It", " is", " <ans", "wer>9", "</an", "swer>\n", "So", "", "é"]  # token 7 is a special token without text
STOP = "</answer>"


def decode(ids):
    return "".join(WORDS[i] for i in ids)


@for_each(
    ("ids", "stop", "kept", "cut"),
    [
        ([0, 1], (STOP,), Ending(2, "It is", ""), None),
        # "\n" of the last token is left out
        ([2, 3, 4, 5], (STOP,), Ending(4, " <answer>9</answer>", STOP), " <answer>9"),
        ([2, 3, 4, 5, 6, 6], (STOP,), Ending(4, " <answer>9</answer>", STOP), " <answer>9"),
        ([4, 5, 4, 5], (STOP,), Ending(2, STOP, STOP), ""),  # the first occurrence
        ([4, 7, 5, 6], (STOP,), Ending(3, STOP, STOP), ""),  # over a token without text
        # complete at the same character: the first
        ([0, 1, 2, 3], ("9", "wer>9"), Ending(4, "It is <answer>9", "9"), "It is <answer>"),
        ([0, 1, 2, 3], ("wer>9", "9"), Ending(4, "It is <answer>9", "wer>9"), "It is <ans"),
        ([0, 1, 2, 3], ("wer>9", "is"), Ending(2, "It is", "is"), "It "),  # the one that is complete first
        ([6, 8, 6], ("é",), Ending(2, "Soé", "é"), "So"),
        ([], (STOP,), Ending(0, "", ""), None),
        ([4, 5], (), Ending(2, "</answer>\n", ""), None),
    ],
)
def test_a_response_ends_with_the_token_that_completes_the_first_stop_string(ids, stop, kept, cut):
    assert find_ending(ids, decode, stop, True) == kept
    assert find_ending(ids, decode, stop, False) == kept._replace(text=kept.text if cut is None else cut)


def test_a_long_response_is_decoded_a_few_times_only():
    calls = []
    ids = [0, 1] * 10_000 + [4, 5] + [0, 1] * 10_000
    ending = find_ending(ids, lambda part: calls.append(0) or decode(part), (STOP,), True)
    assert ending.num_tokens == 20_002 and len(calls) < 20


def ask(url, stop=(STOP,), in_flight="resume", include=True):
    engine = VllmEngine([url], decode, in_flight=in_flight)
    engine.weight_version = 7
    sampling = replace(SAMPLING, max_tokens=8, stop=stop, include_stop=include)
    return engine.generate([PROMPT], 1, sampling, seed=0)[0][0]


def test_a_stop_string_that_an_interruption_splits_ends_the_response():
    first = [choice([2, 3, 4], "abort", ("5", 0, 3))]
    second = [choice([5, 6], "abort", ("6", 0, 2))]  # the server sees only the end of the stop string
    with scripted(first, second, [choice([0, 1], "length", ("7", 0, 2))]) as (url, bodies):
        rollout = ask(url, include=False)
    assert rollout.response_ids.tolist() == [2, 3, 4, 5] and rollout.rollout_logprobs.tolist() == [-0.5] * 4
    assert (rollout.finish_reason, rollout.stop_string, rollout.text) == ("stop", STOP, " <answer>9")
    assert rollout.token_versions.tolist() == [5, 5, 5, 6] and rollout.later_versions == ((3, 6),)
    assert all(body["sampling_params"]["stop"] == [STOP] and body["sampling_params"]["detokenize"] for body in bodies)


def test_a_server_that_goes_on_after_a_stop_string_is_refused():
    with (
        scripted([choice([4, 5, 6], "length", ("7", 0, 3))]) as (url, _),
        pytest.raises(EngineError, match="went on after the stop string"),
    ):
        ask(url)


def test_without_stop_strings_a_server_needs_no_tokenizer():
    with scripted([choice([4, 5, 6], "stop", ("7", 0, 3))]) as (url, bodies):
        rollout = ask(url, stop=())
    assert rollout.text == "</answer>\nSo" and rollout.stop_string is None
    assert bodies[0]["sampling_params"]["detokenize"] is False and "stop" not in bodies[0]["sampling_params"]


TEXTS = ["<think>", "</think>", "a", "b", "<tool_call>", "E", "\n", "Time"]
BUDGET = Thinking(3, "<think>", "</think>", (7, 1), ((0, "<think>"), (1, "</think>")))


def thought(parts, prompt=(2, 0, 6), stop=(), tags=BUDGET.tags, most=8, in_flight="resume", cut=False, **fields):
    """The rollout of a server that gives these parts in turn, (tokens, reason), and the requests. The server leaves out
    special tokens, as tags may be."""
    answers = [[choice(ids, reason, ("7", 0, len(ids)))] for ids, reason in parts]
    special = [token for token, _ in tags] if fields.pop("special", False) else []
    with scripted(*answers) as (url, bodies):
        engine = VllmEngine([url], lambda ids: "".join(TEXTS[i] for i in ids if i not in special), in_flight=in_flight)
        engine.weight_version = 7
        engine._cut = {8} if cut else set()
        sampling = replace(SAMPLING, max_tokens=most, stop=stop, thinking=replace(BUDGET, tags=tags))
        asked = replace(PROMPT, token_ids=prompt, **fields)
        rollout = engine.generate([asked], 1, sampling, seed=0)[0][0]
        assert not [body for body in bodies[len(parts) :] if "sampling_params" in body]
    return rollout, [(body["token_ids"][len(prompt) :], body["sampling_params"]["max_tokens"]) for body in bodies]


OPEN, REST = ([2, 3, 2], "length"), ([3, 5], "stop")


@for_each(
    ("parts", "options", "forced"),
    [
        ([OPEN, REST], {}, True),
        ([([2, 3], "stop")], {}, False),  # over before its budget
        ([([2, 3], "length")], {"most": 2}, False),  # a row's limit
        ([([2, 1, 3], "length"), REST], {}, False),  # a sampled tag closes it: the sentence would be in the answer
        ([([2, 3, 1], "length"), REST], {"special": True}, False),
        ([([2, 4, 3], "length"), REST], {}, False),  # it has called a tool
        ([OPEN, REST], {"prompt": (0, 2, 3)}, False),  # a user's text has the tag
        ([OPEN, REST], {"prompt": (2, 0, 1, 6)}, False),  # the template has closed the thought
        ([OPEN, REST], {"prompt": (2, 0, 1), "special": True}, False),
        ([OPEN, REST], {"prompt": (2, 0, 3), "opened": "<think>b"}, True),  # the prompt has begun the thought
        ([([0, 3, 2], "length"), REST], {"prompt": (2,)}, True),  # the policy opens it
        ([([6, 0, 2], "length"), REST], {"prompt": (2,), "special": True}, True),
        ([([3, 0, 2], "length"), REST], {"prompt": (2,)}, False),  # text precedes it
        ([OPEN, REST], {"tags": ()}, True),  # the tags are several tokens
        ([OPEN, ([3], "length")], {"most": 6}, True),
        ([OPEN, REST], {"most": 5}, False),  # the end and one token do not fit
        ([([2, 3], "abort"), ([2], "length"), REST], {}, True),  # the budget holds over interruptions
        ([([2, 3, 2], "abort"), REST], {}, True),
        ([OPEN, ([3], "abort"), ([5], "stop")], {}, True),
        ([OPEN, REST], {"sampling": {"max_thinking_tokens": 3}}, True),
        ([OPEN, ([2], "length"), REST][1:], {"sampling": {"max_thinking_tokens": 1}}, True),
    ],
)
def test_a_thought_that_is_open_after_its_budget_is_ended(parts, options, forced):
    rollout, asked = thought(parts, **options)
    budget, most = options.get("sampling", {}).get("max_thinking_tokens", 3), options.get("most", 8)
    ids, masks = [], []
    for number, (part, _) in enumerate(parts):
        if forced and 7 not in ids and len(ids) == budget:
            ids, masks = [*ids, 7, 1], [*masks, False, False]
        size = len(ids)
        assert asked[number] == (ids, (min(most, budget) if size < budget else most) - size)
        ids, masks = ids + part, masks + [True] * len(part)
    assert rollout.response_ids.tolist() == ids and rollout.written.tolist() == masks
    assert rollout.rollout_logprobs.tolist() == [-0.5 * own for own in masks] and rollout.length == sum(masks)
    assert rollout.forced == (((budget, budget + 2),) if forced else ()) and rollout.finish_reason == parts[-1][1]
    assert rollout.token_versions.tolist() == [7] * len(ids)


def test_a_stop_string_counts_on_either_side_of_a_forced_end_and_not_across():
    ends, across = ("aE", "eb"), ("ime</think>b",)
    rollout, _ = thought([OPEN, ([3, 2, 5, 3], "length")], stop=ends, most=9)  # the server joins nothing
    assert rollout.response_ids.tolist() == [2, 3, 2, 7, 1, 3, 2, 5] and rollout.stop_string == "aE"
    assert rollout.text == "abaTime</think>baE" and rollout.forced == ((3, 5),)
    rollout, _ = thought([OPEN, ([3, 5], "stop")], stop=across)
    assert rollout.text == "abaTime</think>bE" and rollout.stop_string == ""
    split = [([2, 3], "abort"), ([3], "length")]  # no thought to end: the response is complete
    rollout, _ = thought(split, stop=("bb",))
    assert (rollout.text, rollout.finish_reason, rollout.forced) == ("abb", "stop", ())


def test_a_truncated_group_gets_no_end_of_its_thoughts():
    rollout, asked = thought([OPEN], cut=True)
    assert rollout.response_ids.tolist() == OPEN[0] and rollout.forced == () and len(asked) == 1
