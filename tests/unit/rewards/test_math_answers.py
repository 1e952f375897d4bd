"""The reward of mathematical answers against a table written from first principles, and the rules and examples of
docs/answers.md."""

import json
import re
from pathlib import Path

import pytest

from megagrpo.rewards.math.answers import boxed, final_answer
from tests.unit.for_each import for_each

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "answers.md").read_text()
ROWS = [json.loads(line) for line in (ROOT / "tests" / "data" / "math_answers.jsonl").read_text().splitlines()]
EXAMPLES = re.findall(r"^\| `(.*?)` \| `(.*?)` \| ([01]) \|", PAGE, re.MULTILINE)


def test_every_row_of_the_table_has_its_value():
    from megagrpo.rewards.functions.math_accuracy import accuracy

    wrong = [row for row in ROWS if accuracy([row["completion"]], answer=[row["gold"]]) != [row["value"]]]
    assert not wrong, "\n".join(
        f"{row['gold']!r} {row['completion']!r} is {row['value']}: {row['why']}" for row in wrong
    )
    assert len(ROWS) >= 300


def test_the_examples_of_the_page_have_their_values():
    from megagrpo.rewards.functions.math_accuracy import accuracy

    assert len(EXAMPLES) >= 30
    found = [
        (gold, text, f"{accuracy([text.replace(chr(92) + 'n#', chr(10) + '#')], answer=[gold])[0]:.0f}")
        for gold, text, _ in EXAMPLES
    ]
    assert found == EXAMPLES


@for_each(
    ("text", "prefix", "answer"),
    [
        (r"\boxed{1} and \boxed{\frac{1}{\sqrt{2}}}", "", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\boxed{5}+1}", "", r"\boxed{5}+1"),
        (r"\boxed{\{1, 2\}}", "", r"\{1, 2\}"),
        (r"\boxed{1}, then \boxed{2", "", None),
        (r"\boxed{1, then \boxed{2}", "", "2"),
        (r"\boxed 5", "", "5"),
        (r"\boxed{4}</think>\boxed{5}", "<think>\n", "5"),
        (r"\boxed{4}", "<think>\n", None),
        (r"\boxed{4}", "<think>\n\n</think>\n\n", "4"),
        (r"<think>a</think>\boxed{4}<think>\boxed{5}", "", None),
        ("<answer>1</answer> <answer>2", "", "1"),
        (r"<answer>the root \boxed{3}</answer> \boxed{4}", "", "3"),
        ("It is 3.\n**Final Answer:** **42**", "", "42"),
        ("## Final Answer\n\n$$42$$", "", "$$42$$"),
        ("The answer is $3$ or $5$, as shown.", "", "$3$ or $5$"),
        ("The answer is 3.5 because 7 / 2 = 3.5.", "", "3.5"),
        ("The answer is not known.\nThe answer is therefore 7.", "", "7"),
        ("#### 1,000\n", "", "1,000"),
        ("72", "", "72"),
        ("She has 72.\nOr 73.", "", None),
        ("", "", None),
    ],
)
def test_one_part_of_a_response_is_its_answer(text, prefix, answer):
    assert final_answer(text, prefix) == answer


def test_a_thought_that_the_chat_template_opened_does_not_count():
    from megagrpo.rewards.functions.math_accuracy import Cosine, accuracy, reasoning_accuracy

    texts, golds = [r"so \boxed{3}", r"so \boxed{3}</think> \boxed{3}", r"\boxed{3}"], ["3"] * 3
    assert accuracy(texts, answer=golds, prefixes=["<think>\n", "<think>\n", ""]) == [0.0, 1.0, 1.0]
    values = Cosine()(texts, [[1]] * 3, 100, answer=golds, prefixes=["<think>\n", "<think>\n", ""])
    assert [value > 0 for value in values if value is not None] == [False, True, True]
    assert reasoning_accuracy([r"so \boxed{3}", r"</think> The answer is 3"], answer=golds[:2]) == [0.0, 1.0]


def test_powers_of_units_indices_and_brackets_count():
    from megagrpo.rewards.functions.math_accuracy import accuracy

    equal = [
        (r"3\text{ m}^3", "3 cubic meters"),
        (r"3\text{ m}^3", "3 cu m"),
        (r"3\text{ m}^3", r"3 \text{ meters cubed}"),
        (r"3\text{ m}^2", r"3 \text{ meters squared}"),
        (r"2\text{ km}^2", r"2000000\text{ m}^2"),
        (r"5\text{ s}^{-1}", r"5 \text{ s}^{-1}"),
        ("x₁ + 2", "x_1 + 2"),
        ("x₁₂", "x_{12}"),
        ("x²³", "x^{23}"),
        ("(1, 2)", "1, 2"),
    ]
    different = [
        (r"3\text{ m}^3", "3 square meters"),
        (r"2\text{ km}^2", r"2000\text{ m}^2"),
        (r"2\text{ km}^2", r"2000000\text{ m}"),
        (r"5\text{ s}^{-1}", r"5 \text{ s}^1"),
        ("x₁ + 2", "x_2 + 2"),
        ("x₁ + 2", "x + 2"),
        ("x²³", "3x^2"),
        ("[1, 2]", "1, 2"),
        ("[1, 2]", "(1, 2)"),
        (r"x \in (1, 2)", "1, 2"),
    ]
    found = {pair: accuracy([rf"\boxed{{{pair[1]}}}"], answer=[pair[0]])[0] for pair in (*equal, *different)}
    assert [pair for pair in equal if found[pair] != 1.0] == [] == [pair for pair in different if found[pair] != 0.0]


def test_golds_that_are_numbers_or_empty():
    from megagrpo.rewards.functions.math_accuracy import accuracy

    golds = [72, 72.0, 0.1, None, "", "  ", float("nan"), r"\boxed{", "so 8 * 9 = 72\n#### 72"]
    texts = [r"\boxed{72}", r"\boxed{72}", r"\boxed{\frac{1}{10}}", "1", "1", "1", "1", "1", "#### 72"]
    assert accuracy(texts, answer=golds) == [1.0, 1.0, 1.0, None, None, None, None, None, 1.0]


def test_a_row_without_a_readable_gold_is_named():
    from megagrpo.rewards.functions.math_accuracy import Cosine, accuracy, reasoning_accuracy

    for function in (accuracy, reasoning_accuracy, Cosine):
        fault = vars(function)["row_fault"]
        assert fault(answer=None) == "`answer` has no answer: None"
        assert fault(solution="", answer="3") == "`solution` has no answer: ''"
        assert fault(answer=r"\boxed{3") == r"`answer` has no answer: '\\boxed{3'"
        assert fault(answer="word " * 40).startswith(
            r"`answer` is a text without \boxed{...} or `####`, which only the same text equals: 'word"
        )
        assert [fault(answer=gold) for gold in (72, "3, 5, 7", r"\text{Evelyn}", "word " * 40 + "#### 3")] == [None] * 4


@for_each("gold", [{"value": "3"}, [{"value": "3"}], '{"value": "3"}', ' [{"value": 3, "unit": "cm"}]'])
def test_a_gold_that_is_an_object_is_named_with_its_field(gold):
    from megagrpo.rewards.functions.math_accuracy import accuracy

    assert accuracy([r"\boxed{3}"], answer=[gold]) == [None]
    fault = vars(accuracy)["row_fault"](answer=gold)
    assert "`answer` is an object" in fault and fault.endswith("data.columns: {answer: answer.value}"), fault
    assert vars(accuracy)["row_fault"](answer="{1, 2}") is None


def test_spellings_of_one_answer_are_one_vote_and_pass_together():
    from megagrpo.rewards.functions.math_accuracy import accuracy

    texts = [
        r"\boxed{\frac12}",
        r"\boxed{\dfrac{1}{2}}",
        r"<answer>$\frac 1 2$</answer>",
        r"The answer is \(\tfrac{1}{2}\).",
    ]
    assert {boxed(text) for text in texts} == {r"\frac{1}{2}"}
    assert accuracy(texts, answer=["0.5"] * 4) == [1.0] * 4
    assert boxed("<think>1") is None and boxed("<answer> </answer>") is None


HOSTILE = {
    "a tower of powers": r"\boxed{9^{9^{9^9}}}",
    "a power of a sum": r"\boxed{(x+1)^{1000}}",
    "a factorial of a factorial": r"\boxed{(9!)!}",
    "a large exponent": r"\boxed{1e99999999}",
    "exp of exp": r"\boxed{\exp(\exp(\exp(100)))}",
    "a large binomial": r"\boxed{\binom{1000000000}{500000000}}",
    "open braces": r"\boxed{" + "{" * 100_000 + "}" * 100_000 + "}",
    "boxes in boxes": r"\boxed{" * 10_000 + "5" + "}" * 10_000,
    "parentheses in parentheses": r"\boxed{" + "(" * 1400 + "1" + ")" * 1400 + "}",
    "many items": r"\boxed{" + "x," * 1400 + "1}",
    "many tags": "<answer>" * 100_000,
    "many announcements": "the answer is " * 70_000,
    "spaces": "the answer" + " " * 1_000_000,
    "a lone surrogate": "\\boxed{\ud800}",
    "division by zero": r"\boxed{\frac{1}{0}}",
}


@pytest.mark.parametrize("text", ["(x+1)^{1000}", "9^{9^{9^9}}", r"\exp(\exp(x))", "((x)!)!", "x" * 500])
def test_a_text_that_sympy_computes_for_hours_is_not_tried(text):
    from megagrpo.rewards.math.compare_expressions import UnreadableError, same_value

    with pytest.raises(UnreadableError):
        same_value("x", text)


@pytest.mark.timeout(200)  # of all of them; without the limits one has no end
@for_each("kind", HOSTILE)
def test_a_hostile_answer_is_wrong_and_raises_nothing(kind):
    from megagrpo.rewards.functions.math_accuracy import accuracy

    assert accuracy([HOSTILE[kind]] * 3, answer=["5 km", "x+1", "(1, 2)"]) == [0.0] * 3
