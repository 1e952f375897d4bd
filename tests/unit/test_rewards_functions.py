"""Built-in reward functions against the values of TRL 1.16 and ms-swift 4.6, and against examples by hand."""

import pytest

from megagrpo.rewards.functions import exact_number, first_answer, format, last_number, soft_overlong
from megagrpo.rewards.gym_score import reasoning_gym
from megagrpo.rewards.math_accuracy import accuracy

# (completion, gold, reward), as trl.rewards.accuracy_reward gives
TRL_ACCURACY = [
    (r"My answer is \boxed{\frac{1}{3}}", r"\frac{1}{3}", 1.0),
    (r"\boxed{42}", "42", 1.0),
    (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
    (r"\boxed{3} then \boxed{5}", "5", 0.0),
    (r"\boxed{1,000}", "1000", 1.0),
    (r"\boxed{10 \text{ cm}}", "10", 1.0),
    (r"\boxed{}", "3", 0.0),
    (r"\boxed{(1,2)}", "(1,2)", None),
    (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1.0),
]
# the same by ms-swift's MathAccuracy; an unreadable gold is None here, where ms-swift gives 0.0
SWIFT_ACCURACY = [
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}", 1.0),
    ("<think>x</think><answer>42</answer>", "42", 1.0),
    (r"<answer>\boxed{42}</answer>", "<answer>42</answer>", 1.0),
    ("$42$", "42", 0.0),
    ("<answer>1/2</answer>", r"$\frac{1}{2}$", 1.0),
    ("<answer>3</answer> <answer>5</answer>", "5", 0.0),
    (r"\boxed{5}", "words", None),
]
SWIFT_FORMAT = [
    ("<think>t</think><answer>a</answer>", 1.0),
    ("<think>\nt\n</think>\n\n<answer>\na\n</answer>", 1.0),
    ("<think>t</think><answer>a</answer>\n", 0.0),
    ("<think>t</think>x<answer>a</answer>", 0.0),
    ("<think>t<answer>a</answer>", 0.0),
    ("<think>t</think><answer>a</answer><answer>b</answer>", 1.0),
    ("pre\n<think>t</think><answer>a</answer>", 0.0),
]
# (max_completion_length, cache_length, length, reward)
TRL_OVERLONG = [
    (100, 20, 0, 0.0),
    (100, 20, 80, 0.0),
    (100, 20, 90, -0.5),
    (100, 20, 100, -1.0),
    (100, 20, 500, -1.0),
    (100, 0, 100, 0.0),
    (100, 0, 101, -1.0),
    (4096, 819, 3277, 0.0),
    (4096, 819, 3686, -0.4993894993894994),
    (4096, 819, 4097, -1.0),
]
SWIFT_OVERLONG = [
    (100, 20, 0, 0.0),
    (100, 20, 80, 0.0),
    (100, 20, 90, -0.5),
    (100, 20, 101, -1.05),
    (100, 20, 200, -6.0),
    (4096, 819, 3278, -0.001221001221001221),
    (4096, 819, 4096, -1.0),
]


@pytest.mark.parametrize("completion, gold, reward", TRL_ACCURACY + SWIFT_ACCURACY)
def test_accuracy_gives_the_reference_values(completion, gold, reward):
    assert accuracy([completion], solution=[gold]) == [reward]


def test_accuracy_takes_an_interval_for_a_gold_inequality_and_not_the_reverse():
    assert accuracy([r"\boxed{(1,2)}"], solution=["$1<x<2$"]) == [1.0]
    assert accuracy([r"\boxed{1<x<2}"], solution=["$(1,2)$"]) == [0.0]


def test_accuracy_reads_the_answer_column_when_there_is_no_solution_and_takes_messages():
    completions = [[{"role": "assistant", "content": r"so \boxed{7}"}], [{"role": "assistant", "content": r"\boxed{8}"}]]
    assert accuracy(completions, answer=[7, 7]) == [1.0, 0.0]


@pytest.mark.parametrize("completion, reward", SWIFT_FORMAT)
def test_format_gives_the_reference_values(completion, reward):
    assert format([completion]) == [reward]
    assert format([[{"role": "assistant", "content": completion}]]) == [reward]


@pytest.mark.parametrize("maximum, cache, length, reward", TRL_OVERLONG)
def test_soft_overlong_gives_the_values_of_trl(maximum, cache, length, reward):
    assert soft_overlong([[1] * length], maximum, cache_length=cache) == pytest.approx([reward], rel=1e-12)


@pytest.mark.parametrize("maximum, cache, length, reward", SWIFT_OVERLONG)
def test_soft_overlong_without_a_floor_gives_the_values_of_ms_swift(maximum, cache, length, reward):
    assert soft_overlong([[1] * length], maximum, cache_length=cache, floor=None) == pytest.approx([reward], rel=1e-12)


def test_soft_overlong_takes_a_fifth_of_the_maximum_as_slope():
    assert soft_overlong([[1] * 90], 100) == soft_overlong([[1] * 90], 100, cache_length=20) == [-0.5]


@pytest.mark.parametrize("cache, floor", [(101, -1.0), (-1, -1.0), (0, None)])
def test_soft_overlong_refuses_a_slope_that_does_not_fit(cache, floor):
    with pytest.raises(ValueError, match=f"cache_length {cache}"):
        soft_overlong([[1]], 100, cache_length=cache, floor=floor)


@pytest.mark.parametrize(
    "text, number",
    [
        ("3 + 7 equals 10.", "10"),
        ("10 - 3 = 7", "7"),
        ("x = -5", "-5"),
        ("x = \N{MINUS SIGN}5", "-5"),
        ("what is 5-3", "3"),
        ("(2)-3", "3"),
        ("1,234,567 in all", "1234567"),
        ("1,2345", "2345"),
        ("3,4", "4"),
        ("it costs $12.50.", "12.50"),
        ("about .5", "0.5"),
        ("7. 8.", "8"),
        ("007", "7"),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == type(last_number("1"))(number)


def test_a_text_without_digits_has_no_number():
    assert last_number("ten - . , -") is None


def test_exact_number_compares_values_and_skips_rows_without_a_gold_number():
    completions = ["the sum is 10.0", "the sum is 11", "no idea", "1,000", "5", "72 apples"]
    golds = [10, "10", "10", "1000", "five", "She has 8 * 9 = 72.\n#### 72"]
    assert exact_number(completions, answer=golds) == [1.0, 0.0, 0.0, 1.0, None, 1.0]


def test_the_first_answer_tag_counts():
    assert first_answer("<answer>\n 3 </answer><answer>4</answer>") == "3"
    assert first_answer("<answer>3") is None


def test_reasoning_gym_scores_by_the_family_of_each_row():
    import reasoning_gym as gym

    rows = [gym.create_dataset("chain_sum", size=1, seed=3)[0], gym.create_dataset("gcd", size=1, seed=3)[0]]
    columns = {name: [row[name] for row in rows] for name in ("question", "answer", "metadata")}
    tagged = [f"hm <answer>{row['answer']}</answer>" for row in rows]
    assert reasoning_gym(tagged, **columns) == [1.0, 1.0]
    assert reasoning_gym([f"it is {row['answer']}." for row in rows], **columns, extract="number") == [1.0, 1.0]
    assert reasoning_gym([f"it is {row['answer']}.00" for row in rows], **columns, extract="number") == [1.0, 1.0]
    assert reasoning_gym(["<answer>x</answer>", "nothing"], **columns, extract="number")[1] == 0.0
