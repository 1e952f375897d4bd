"""Built-in reward functions on examples by hand. test_reference_rewards.py compares with the reference systems."""

import pytest

from megagrpo.rewards.functions.text_rewards import (
    encodable,
    first_answer,
    format,
    react_format,
    repetition,
    soft_overlong,
    think_format,
    token_repetition,
)
from tests.unit.for_each import for_each


def test_accuracy_takes_an_interval_for_an_inequality_and_as_trl_for_a_gold_inequality_alone():
    from megagrpo.rewards.functions.math_accuracy import accuracy

    texts, golds = [r"\boxed{(1,2)}", r"\boxed{1<x<2}"], ["$1<x<2$", "$(1,2)$"]
    assert accuracy(texts, solution=golds) == [1.0, 1.0]
    assert accuracy(texts, solution=golds, as_trl=True) == [1.0, 0.0]


def test_accuracy_reads_the_answer_column_when_there_is_no_solution_and_takes_messages():
    from megagrpo.rewards.functions.math_accuracy import accuracy

    completions = [
        [{"role": "assistant", "content": r"so \boxed{7}"}],
        [{"role": "assistant", "content": r"\boxed{8}"}],
    ]
    assert accuracy(completions, answer=[7, 7]) == [1.0, 0.0]


def test_soft_overlong_takes_a_fifth_of_the_maximum_as_slope():
    assert soft_overlong([[1] * 90], 100) == soft_overlong([[1] * 90], 100, cache_length=20) == [-0.5]


@pytest.mark.parametrize("cache, floor", [(101, -1.0), (-1, -1.0), (0, None)])
def test_soft_overlong_refuses_a_slope_that_does_not_fit(cache, floor):
    with pytest.raises(ValueError, match=f"cache_length {cache}"):
        soft_overlong([[1]], 100, cache_length=cache, floor=floor)


def test_the_first_answer_tag_counts():
    assert first_answer("<answer>\n 3 </answer><answer>4</answer>") == "3"
    assert first_answer("<answer>3") is None


def test_reasoning_gym_scores_by_the_family_of_each_row():
    import reasoning_gym as gym

    from megagrpo.rewards.functions.gym_score import reasoning_gym

    rows = [gym.create_dataset("chain_sum", size=1, seed=3)[0], gym.create_dataset("gcd", size=1, seed=3)[0]]
    columns = {name: [row[name] for row in rows] for name in ("question", "answer", "metadata")}
    tagged = [f"hm <answer>{row['answer']}</answer>" for row in rows]
    assert reasoning_gym(tagged, **columns) == [1.0, 1.0]
    assert reasoning_gym([f"it is {row['answer']}." for row in rows], **columns, extract="number") == [1.0, 1.0]
    assert reasoning_gym([f"it is {row['answer']}.00" for row in rows], **columns, extract="number") == [1.0, 1.0]
    assert reasoning_gym(["<answer>x</answer>", "nothing"], **columns, extract="number")[1] == 0.0


def test_format_takes_a_hostile_text_in_linear_time():
    assert format(["<think>" + "</think><answer>" * 60_000]) == [0.0]
    assert format(["<think>" + "</think> " * 60_000 + "<answer></answer>"]) == [1.0]
    assert format(["<think><answer></answer>", "<think></think><answer>", "<think></think></answer>"]) == [
        0.0,
        0.0,
        0.0,
    ]


def test_the_reasoning_ends_at_the_last_of_the_first_delimiter_that_occurs():
    from megagrpo.rewards.functions.math_accuracy import reasoning_accuracy

    texts = [r"\boxed{1}</r> \boxed{2} </r> \boxed{3}", r"\boxed{3}</r></think>\boxed{4}"]
    assert reasoning_accuracy(texts, solution=["3", "3"], delimiters=("</think>", "</r>")) == [1.0, 0.0]
    assert reasoning_accuracy([r"</think> \boxed{3}"], solution=[""]) == [None]
    assert reasoning_accuracy([r"</think> \boxed{3}"], solution=["words"], as_trl=True) == [None]


def test_cosine_scales_accuracy_by_length_and_cannot_score_without_a_gold():
    from megagrpo.rewards.functions.math_accuracy import Cosine

    texts = [r"\boxed{3}", r"\boxed{4}", r"\boxed{3}"]
    ids = [[1] * 50, [1] * 50, []]
    assert Cosine()(texts, ids, 100, solution=["3", "3", None]) == pytest.approx([0.75, -0.75, None])
    assert Cosine(max_len=50, min_len_value_correct=2.0)(texts, ids, 100, answer=["3"] * 3) == pytest.approx(
        [0.5, -0.5, 2.0]
    )
    with pytest.raises(ValueError, match="max_len 0 must be above 0"):
        Cosine(max_len=0)(texts, ids, 100, answer=["3"] * 3)


@pytest.mark.parametrize(
    "function, options, rule",
    [
        (repetition, {"n_grams": 0}, "n_grams 0"),
        (token_repetition, {"ngram_size": 0}, "ngram_size 0"),
        (repetition, {"max_penalty": 1}, "0 or less"),
    ],
)
def test_repetition_refuses_options_without_a_meaning(function, options, rule):
    with pytest.raises(ValueError, match=rule):
        function([[1, 2]] if function is token_repetition else ["a b"], **options)


def test_lone_surrogates_become_question_marks():
    assert encodable("a\ud800\udfffb") == "a??b" and encodable("ä\U0001f600") == "ä\U0001f600"


R1 = "<think>\n"


@for_each(
    ("function", "prefix", "completion", "value"),
    [
        (think_format, R1, "It is 3.</think>3", 1.0),
        (think_format, "", "It is 3.</think>3", 0.0),
        (think_format, R1, "It is 3.", 0.0),
        (think_format, R1, "<think>It is 3.</think>3", 0.0),  # a second tag
        (think_format, "<think>\nOkay,", " so 3.</think>3", 1.0),
        (think_format, "<think>", "</think>3", 1.0),
        (think_format, "<reasoning>\n", "<think>a</think>3", 0.0),
        (format, R1, "It is 3.</think>\n<answer>3</answer>", 1.0),
        (format, R1, "It is 3.</think> So <answer>3</answer>", 0.0),
        (format, "", "It is 3.</think>\n<answer>3</answer>", 0.0),
        (react_format, R1, "a</think> Action: search Action Input: x", 1.0),
        (react_format, "", "a</think> Action: search Action Input: x", 0.0),
    ],
)
def test_a_tag_that_the_template_has_opened_is_part_of_the_response(function, prefix, completion, value):
    assert function([completion], prefixes=[prefix]) == [value]
    assert function([[{"role": "assistant", "content": completion}]], prefixes=[prefix]) == [value]
    if not prefix:
        assert function([completion]) == [value]
