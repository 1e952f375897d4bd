"""Stop strings: where a response ends in tokens and in text, also when an interruption splits the stop string."""

from dataclasses import replace

import pytest

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import EngineError
from megagrpo.engine.responses import Ending, find_ending
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
