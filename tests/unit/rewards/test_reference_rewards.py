"""Reward functions against values that TRL 1.16, ms-swift 4.6 and the Unsloth notebook computed. Differences we chose
are asserted."""

import importlib.util
import json
from pathlib import Path

import pytest

from megagrpo.config import RewardsSection, load_config
from megagrpo.data.prompts import hash_answer
from megagrpo.rewards.functions.text_rewards import (
    format,
    react_format,
    repetition,
    soft_overlong,
    think_format,
    token_repetition,
)
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Prompt, Rollout
from tests.unit.for_each import for_each

VECTORS = Path(__file__).parents[2] / "vectors"
TRL, SWIFT, NOTEBOOK = (
    json.loads((VECTORS / f"{name}_rewards.json").read_text()) for name in ("trl", "swift", "unsloth")
)
TAG_REWARDS = Path(__file__).parents[3] / "configs" / "examples" / "gsm8k_xml" / "rewards.py"
_SPEC = importlib.util.spec_from_file_location("tag_rewards", TAG_REWARDS)
tags = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tags)

# Cases where ms-swift returns a number and ours does not: an unreadable gold answer says nothing about the completion
# (TRL's rule too).
UNREADABLE_GOLD = {"words"}


@for_each("case", TRL["accuracy_reward"])
def test_accuracy_as_trl(case):
    from megagrpo.rewards.functions.math_accuracy import accuracy

    assert accuracy([case["completion"]], solution=[case["solution"]], as_trl=True) == [case["reward"]]


@pytest.mark.parametrize("case", TRL["reasoning_accuracy_reward"])
def test_reasoning_accuracy_as_trl(case):
    from megagrpo.rewards.functions.math_accuracy import reasoning_accuracy

    assert reasoning_accuracy([case["completion"]], solution=[case["solution"]], as_trl=True) == [case["reward"]]


@pytest.mark.parametrize("case", TRL["think_format_reward"])
def test_think_format_as_trl(case):
    assert think_format([case["completion"]]) == [case["reward"]]


def test_cosine_as_trl():
    from megagrpo.rewards.functions.math_accuracy import Cosine

    defaults = TRL["cosine_scaled_reward"]["defaults"]
    named = dict(min_value_wrong="min_len_value_wrong", max_value_wrong="max_len_value_wrong")
    # TRL orders by value, we by length
    named |= dict(min_value_correct="max_len_value_correct", max_value_correct="min_len_value_correct")
    values = {ours: defaults[theirs] for theirs, ours in named.items()}
    for case in TRL["cosine_scaled_reward"]["cases"]:
        right, length = bool(case["correct"]), case["length"]
        assert Cosine(**values).value(right, length, defaults["max_len"]) == pytest.approx(case["reward"], rel=1e-12)
        # they are our defaults
        assert Cosine().value(right, length, defaults["max_len"]) == pytest.approx(case["reward"], rel=1e-12)


@for_each("case", TRL["repetition_penalty_reward"])
def test_token_repetition_as_trl(case):
    value = token_repetition([case["completion_ids"]], ngram_size=case["ngram_size"], max_penalty=case["max_penalty"])
    assert value == pytest.approx([case["reward"]], rel=1e-12)


@for_each("case", TRL["soft_overlong_punishment"])
def test_soft_overlong_as_trl(case):
    ids = [[1] * case["length"]]
    value = soft_overlong(ids, case["max_completion_len"], cache_length=case["soft_punish_cache"])
    assert value == pytest.approx([case["reward"]], rel=1e-12)


@pytest.mark.parametrize("case", SWIFT["format"])
def test_format_as_ms_swift(case):
    assert format([case["completion"]]) == [case["reward"]] == [case["seed_era"]]
    assert format([[{"role": "assistant", "content": case["completion"]}]]) == [case["reward"]]


@pytest.mark.parametrize("case", SWIFT["react_format"])
def test_react_format_as_ms_swift(case):
    assert react_format([case["completion"]]) == [case["reward"]]


@for_each("case", SWIFT["accuracy"])
def test_accuracy_as_ms_swift_but_for_an_unreadable_gold(case):
    from megagrpo.rewards.functions.math_accuracy import accuracy

    value = accuracy([case["completion"]], solution=[case["solution"]], as_trl=True)
    assert value == ([None] if case["solution"] in UNREADABLE_GOLD else [case["reward"]])


def test_cosine_as_ms_swift_with_its_values_and_without_the_clamp():
    from megagrpo.rewards.functions.math_accuracy import Cosine

    params, limit = SWIFT["cosine"]["params"], SWIFT["cosine"]["params"]["cosine_max_len"]
    names = ("min_len_value_wrong", "max_len_value_wrong", "min_len_value_correct", "max_len_value_correct")
    values = {name: params[f"cosine_{name}"] for name in names}
    for case in SWIFT["cosine"]["cases"]:
        right, length = case["acc"] >= 1, case["length"]
        assert Cosine(**values, clamp=False).value(right, length, limit) == pytest.approx(case["reward"], rel=1e-12)
        # By default a response above the maximum gets the reward at the maximum, not the reward of a shorter one.
        clamped = Cosine(**values).value(right, length, limit)
        beyond = values["max_len_value_correct" if right else "max_len_value_wrong"]
        assert clamped == pytest.approx(beyond if length > limit else case["reward"], rel=1e-12)


@for_each("case", SWIFT["repetition"])
def test_repetition_as_ms_swift(case):
    value = repetition([case["completion"]], n_grams=case["n"], max_penalty=case["max_penalty"])
    assert value == pytest.approx([case["reward"]], rel=1e-12)
    assert value == pytest.approx([case["seed_era"]], rel=1e-12)


@pytest.mark.parametrize("case", SWIFT["soft_overlong"]["cases"])
def test_soft_overlong_as_ms_swift_without_the_floor(case):
    ids, limit, cache = [[1] * case["length"]], case["soft_max_length"], case["soft_cache_length"]
    assert soft_overlong(ids, limit, cache_length=cache, floor=None) == pytest.approx([case["reward"]], rel=1e-12)
    # With the floor, TRL's default and ours, no reward falls below -1.
    assert soft_overlong(ids, limit, cache_length=cache) == pytest.approx([max(case["reward"], -1.0)], rel=1e-12)


def test_soft_overlong_takes_a_slope_as_long_as_the_maximum_which_ms_swift_refuses():
    assert SWIFT["soft_overlong"]["cache_eq_max"].startswith("AssertionError")
    assert soft_overlong([[1] * 50], 100, cache_length=100) == [-0.5]  # well defined, and DAPO's formula allows it


def test_the_arguments_of_ms_swifts_length_rewards_are_args_in_the_config():
    """Maps its option names: drops prefixes, and `soft_max_length` is `max_completion_length`. One call of the scorer
    takes all its vectors."""
    params = SWIFT["cosine"]["params"]
    names = {name: name.removeprefix("cosine_").removeprefix("repetition_").removeprefix("soft_") for name in params}
    names |= {"soft_max_length": "max_completion_length"}
    args = {
        of: {ours: params[its] for its, ours in names.items() if its.startswith(of)}
        for of in ("cosine", "repetition", "soft")
    }
    functions = [
        {"function": "cosine", "args": args["cosine"] | {"clamp": False}},
        {"function": "repetition", "args": args["repetition"]},
        {"function": "soft_overlong", "args": args["soft"] | {"floor": None}},
    ]

    def rollout(length, text, solution):
        prompt = Prompt(0, (1,), "Q", {"solution": solution})
        return Rollout(prompt, (1,) * length, (0.0,) * length, "stop", 0, text)

    cosines = SWIFT["cosine"]["cases"]
    texts = [case for case in SWIFT["repetition"] if (case["n"], case["max_penalty"]) == (3, -1.0)]
    softs = [
        case
        for case in SWIFT["soft_overlong"]["cases"]
        if (case["soft_max_length"], case["soft_cache_length"]) == (100, 20)
    ]
    assert texts and softs
    given = [rollout(case["length"], "<answer>7</answer>", "7" if case["acc"] >= 1 else "8") for case in cosines]
    given += [rollout(1, case["completion"], "7") for case in texts] + [
        rollout(case["length"], "", "7") for case in softs
    ]
    # not the 100 tokens of the vectors
    with RewardScorer(RewardsSection(functions=functions, workers=1), 16) as scorer:
        found = scorer.score(given)
    of_texts = len(cosines) + len(texts)
    for case, scored in zip(cosines, found, strict=False):
        assert scored.rewards["cosine"] == pytest.approx(case["reward"], rel=1e-9, abs=1e-12)
    for case, scored in zip(texts, found[len(cosines) : of_texts], strict=True):
        assert scored.rewards["repetition"] == pytest.approx(case["reward"], rel=1e-9)
    for case, scored in zip(softs, found[of_texts:], strict=True):
        assert scored.rewards["soft_overlong"] == pytest.approx(case["reward"], rel=1e-9)


@for_each("case", NOTEBOOK["cases"])
def test_the_five_tag_rewards_as_the_notebook(case):
    texts = [case["completion"]]
    assert tags.xml_answer(texts[0]) == case["extracted"]
    values = [
        *tags.xmlcount(texts),
        *tags.soft_format(texts),
        *tags.strict_format(texts),
        *tags.whole_number(texts),
        *tags.correctness(texts, [case["answer"]]),
    ]
    assert values == pytest.approx([case[name] for name in NOTEBOOK["order"]], rel=1e-12, abs=1e-15)
    assert sum(values) == pytest.approx(case["total"])


PERFECT = "<reasoning>\nIt is 13.\n</reasoning>\n<answer>\n13\n</answer>\n"


def test_the_fixed_tag_rewards_mend_what_the_notebook_gets_wrong():
    two_lines = PERFECT.replace("13.\n", "13.\nSure.\n")
    assert (tags.soft_format([two_lines]), tags.soft_format([two_lines], fixed=True)) == ([0.0], [0.5])
    assert (tags.strict_format([two_lines]), tags.strict_format([two_lines], fixed=True)) == ([0.0], [0.5])
    assert (tags.strict_format([PERFECT[:-1]]), tags.strict_format([PERFECT[:-1]], fixed=True)) == ([0.0], [0.5])
    assert tags.strict_format([PERFECT + "\n", PERFECT + "x"], fixed=True) == [0.0, 0.0]
    assert tags.xmlcount([PERFECT, PERFECT[:-1], PERFECT + "x" * 10], fixed=True) == pytest.approx([0.5, 0.5, 0.49])
    assert tags.xmlcount([PERFECT + "x" * 10]) == pytest.approx([0.48])  # counted twice
    answers = [f"<answer>{a}</answer>" for a in ("-5", "1,000", "\u00b2", "13", "3.5", "1,00", "")]
    assert tags.whole_number(answers) == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0]
    assert tags.whole_number(answers, fixed=True) == [0.5, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0]
    assert tags.correctness(answers[:2], ["-5.0", "1000"]) == [0.0, 0.0]
    assert tags.correctness([*answers[:2], "x", "x"], ["-5.0", "1000", "7", None], fixed=True) == [2.0, 2.0, 0.0, None]


@for_each(
    ("function", "prefix", "completion", "value"),
    [
        ("soft_format", "<reasoning>", "a</reasoning> <answer>3</answer>", 0.5),
        ("soft_format", "", "a</reasoning> <answer>3</answer>", 0.0),
        ("strict_format", "<reasoning>\n", "a\n</reasoning>\n<answer>\n3\n</answer>\n", 0.5),
        ("xmlcount", "<reasoning>\n", "a\n</reasoning>\n<answer>\n3\n</answer>\n", 0.5),
        ("xmlcount", "", "a\n</reasoning>\n<answer>\n3\n</answer>\n", 0.375),
    ],
)
def test_a_reasoning_tag_that_the_template_has_opened_is_part_of_the_response(function, prefix, completion, value):
    assert getattr(tags, function)([completion], prefixes=[prefix]) == [value]


def test_a_perfect_answer_earns_what_the_notebook_says():
    totals = [case["total"] for case in NOTEBOOK["cases"]]
    assert max(totals) == NOTEBOOK["max_total_single_line"] == 3.5


def test_the_notebook_prints_the_first_completion_and_we_do_not(capsys):
    """The console and completions.jsonl show completions with their rewards; our reward functions print nothing."""
    assert NOTEBOOK["printed_first_only"].startswith("-" * 20)
    tags.correctness([NOTEBOOK["cases"][0]["completion"]], ["13"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("case", NOTEBOOK["extract_hash_answer"])
def test_the_answer_after_the_hashes_as_the_notebook(case):
    assert hash_answer(case["text"]) == case["answer"]


def test_the_gsm8k_example_asks_and_scores_as_the_notebook():
    config = load_config(TAG_REWARDS.with_name("run.yaml"))
    assert config.data.system_prompt == NOTEBOOK["system_prompt"]
    assert [f"{name}_reward_func" for name in config.rewards.names] == NOTEBOOK["order"]
    answer = NOTEBOOK["xml_cot_format"].format(reasoning="It is 13.", answer="13")
    assert answer == NOTEBOOK["cases"][0]["completion"]  # what that prompt asks for earns 3.5


def test_every_vector_is_looked_at():
    looked_at = {"accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "cosine_scaled_reward"}
    looked_at |= {"repetition_penalty_reward", "soft_overlong_punishment"}
    assert set(TRL) - {"produced_by", "math_verify", "latex2sympy2"} == looked_at
    # `nested_turns` is the length of a list of turns; a completion's ids are one flat list here.
    assert set(SWIFT) - {"produced_by", "math_verify", "seed_era_notes"} == {
        *("format", "react_format", "accuracy", "cosine", "repetition", "soft_overlong")
    }
