"""The last number of a text, and the reward that compares it: docs/rewards.md states the rule."""

from decimal import Decimal

from megagrpo.rewards.functions.text_rewards import exact_number
from megagrpo.rewards.math.answers import extractor
from megagrpo.rewards.math.numbers import last_number
from tests.unit.for_each import for_each

# Kind of writing: texts with the value of their last number.
VALUES = {
    "plain": {"3 + 7 equals 10.": 10, "72.": 72, "72.00": 72, "007": 7, "+5": 5, ".5": "0.5", "5.": 5, "7. "
        "8.": 8, "wait...5": 5},
    "in words": {"72 (seventy-two)": 72, "**72**": 72, "__72__": 72, "_72_": 72, "72</answer>": 72, "No. "
        "5": 5, "3rd": 3, "Fig.5": 5}
    | {"答案是72。": 72, "답은 72입니다": 72, "5 apples, 6 pears": 6, "is**72**": 72},
    "a sign": {"x = -5": -5, "x=-5": -5, "is -5": -5, "-.5": "-0.5", "5 -3": -3, "答案是-3": -3, "a\n-3": -3, r"\mathbf{-3}": -3}
    | {"\N{MINUS SIGN}5": -5, "\N{EN DASH}5": -5, "\N{FULLWIDTH HYPHEN-MINUS}12.5": "-12.5", "(2, -3)": -3},
    "a sign with a space": {"= - 3": -3, "- 3": -3, "The answer is - 3": -3, "Answer: - 3": -3, "5 + - "
        "3": -3, r"\approx - 3": -3}
    | {"(1, - 3)": -3, "**- 3**": -3, "= - 3/4": "-0.75", "\n - 3": -3},
    "no sign": {"5 - 3": 3, "what is 5-3": 3, "x - 3": 3, "x-3": 3, "(2)-3": 3, r"\frac{1}{2}-3": 3, "5% - "
        "3": 3, "3-5": 5}
    | {"3\N{EN DASH}5": 5, "Total - 3": 3, "**Total** - 3": 3, "list:\n- 3 apples": 3, "x² - 3": 3},
    "money": {"-$5": -5, "$-5": -5, "- $5": -5, "-US$5": -5, "-€1,000.50": "-1000.5", "€-5": -5, "-5 €": -5, r"-\$5": -5, "$-5$": -5}
    | {"$- 5$": -5, "USD 72": 72, "USD72": 72, "Rs.500": 500, r"=\$72": 72, "costs $5-$3": 3, "5$ - 3": 3, "$x$-3": 3, "$5$ - $3$": 3},
    "groups": {"1,234,567 in all": 1234567, "1'000": 1000, "1\N{RIGHT SINGLE QUOTATION MARK}000": 1000, "1_000": 1000, "1 000": 1000}
    | {"1\N{NARROW NO-BREAK SPACE}000,5": 5, r"1\,000": 1000, "1{,}000": 1000, "1,00,000": 100000, "1,2345": 2345, "3,4": 4}
    | {"2024 100": 100},
    "scientific": {"1.5e3": 1500, "1.5E-3": "0.0015", "1e+22": "1e22", "1.5 × 10^3": 1500, r"1.5 \times "
        r"10^{3}": 1500, "1.5×10⁻³": "0.0015"}
    | {r"2 \cdot 10^{-3}": "0.002", "1.5*10**3": 1500, "1.5 x 10^3": 1500, "2 * 10": 10},
    "powers": {"10^2": 100, "10^{-3}": "0.001", "10^-3": "0.001", "10²": 100, "2^{10}": 1024, "2**10": 1024, "2^-3": "0.125", "-2^2": -4},
    "units": {"25 m^2": 25, "25m^2": 25, "25 m²": 25, "25 m**2": 25, r"25 \text{ m}^2": 25, "10 m/s^2": 10, "3 m "
        "s^{-1}": 3, "50%": 50}
    | {r"50\%": 50, "45°": 45, r"90^\circ": 90, r"90^{\circ}": 90, "5^{th}": 5, "5 km": 5},
    "names": {"72 g of CO2": 72, "72 H2O": 72, "72 is x_2": 72, "72 is x_{12}": 72, "72 x2": 72, r"\log_2 8": 8}
    | {r"\log_{10} 100": 100, "101_2": 101, r"\approx72": 72, "9 at v1.2": 9},
    "fractions": {"3/4": "0.75", "3 / 4": "0.75", "3/4.": "0.75", "-3/4": "-0.75", r"\frac{3}{4}": "0.75", r"\dfrac34": "0.75"}
    | {"½": "0.5", "-½": "-0.5", r"-\frac{3}{4}": "-0.75", r"\frac{-3}{4}": "-0.75", "2 1/2": "2.5", "-2 "
        "1/2": "-2.5", "2½": "2.5"}
    | {r"2\frac{1}{2}": "2.5", "1,000/8": 125},
    "other digits": {"\uff11\uff12": 12, "\u0667\u0662": 72, "\uff11\uff0c\uff10\uff10\uff10\uff0e\uff15": "1000.5"},
    "no numbers of their "
    "own": {"72 at 7:30": 72, "72 on 1/2/2024": 72, "72 on 2024-05-01": 72, "72 in 1.2.3": 72, "72 ± 2": 72}
    | {"72 is 0x1F": 72, r"72 \pm 2": 72, "72 +/- 2": 72, "72 is 1.000.000,50": 72, "72 is 1.000,50": 72, "72 to "
        "3:4": 72},
}  # fmt: skip
NOTHING = (
    "",
    "ten - . , -",
    "H2O",
    "x^2",
    "x = ±5",
    "0x1F",
    "7:30",
    "1.2.3",
    "5/0",
    "1e99999",
    "1e" + "9" * 10_000,
    "9^9999",
    "2^{" + "9" * 5000 + "}",
)


@for_each("kind", VALUES)
def test_the_last_number_of_a_text(kind):
    found = {text: last_number(text) for text in VALUES[kind]}
    assert found == {text: Decimal(value) for text, value in VALUES[kind].items()}


@for_each("text", NOTHING)
def test_a_text_without_a_number_has_no_value(text):
    assert last_number(text) is None


def test_digits_are_compared_to_the_last_one():
    long = "123456789" * 1111
    assert exact_number([long, long + "0", f"-{long}", f"0.{long}"], answer=[long, long, f"-{long}", f"0.{long}1"]) == [
        1.0,
        0.0,
        1.0,
        0.0,
    ]
    assert exact_number(["2/6", "0.333333333333333333333333333333", "3/9"], answer=["1/3", "1/3", r"\frac{1}{3}"]) == [
        1.0,
        0.0,
        1.0,
    ]


# What the response is, its prefix, and the value of its number.
ANSWERS = [
    ("<think>3 or 4</think>It is 5", "", 5),
    ("<think>it is 5", "", None),
    ("it is 5", "<think>\n", None),
    ("so 4</think>5", "<think>\n", 5),
    ("5", "<think>\n\n</think>\n\n", 5),
    ("<think>a</think> 4 <think>5", "", None),
    ("<think><answer>8</answer></think><answer>5</answer> of 9", "", 5),
    ("<answer>4</answer> no, <answer>5</answer>", "", 5),
    (r"<answer>so \boxed{5} of 7</answer> 6", "", 5),
    (r"\boxed{4} no, \boxed{\$5} of 9", "", 5),
    (r"\boxed{\frac{1}{2}} of 9", "", "0.5"),
    (r"so 4 is \boxed{5", "", None),
    ("<answer>none</answer> 5", "", None),
    ("#### 5\n\nQuestion: 6 + 7", "", 5),
    ("#### -$5.", "", -5),
    ("#### Step 3: multiply\n8 * 9 = 72", "", 72),
    ("72\nof 80", "", 80),
]  # fmt: skip


@for_each("text, prefix, number", ANSWERS)
def test_the_number_of_a_response_is_the_last_one_of_its_answer(text, prefix, number):
    assert exact_number([text], answer=[number or 5], prefixes=[prefix]) == [float(number is not None)]
    if not prefix:
        vote = extractor("auto", "exact_number")(text)
        assert vote == (None if number is None else str(number))


def test_responses_that_earn_the_same_have_the_same_vote():
    number = extractor("number", "")
    assert [number(text) for text in ("1,000", "1000.0", "1e3", "10^3", "$1 000", "-0")] == ["1000"] * 5 + ["0"]
    assert number("1" * 40) != number("1" * 39 + "2") and number("1e9999") == "1" + "0" * 9999


def test_a_gold_without_a_number_or_with_several_scores_nothing():
    golds = [
        10,
        "10",
        7.5,
        "five",
        None,
        "between 3 and 5",
        "(1,2)",
        "72 apples",
        "She has 8 * 9 = 72.\n#### 72",
        r"is \boxed{3}",
    ]
    texts = ["10.0", "11", "15/2", "5", "5", "5", "2", "72", "72", "3"]
    assert exact_number(texts, answer=golds) == [1.0, 0.0, 1.0, None, None, None, None, 1.0, 1.0, 1.0]


@for_each(
    "gold",
    [
        72,
        7.5,
        "72",
        "-$5",
        "5 €",
        "50%",
        "$72$",
        "1,000.",
        "2 1/2",
        r"\frac{3}{4}",
        "1.5e3",
        "so 8 * 9\n#### 72",
        r"is \boxed{72}",
    ],
)
def test_a_plain_number_is_a_gold(gold):
    assert vars(exact_number)["row_fault"](answer=gold) is None


NOT_PLAIN = [
    "25 m^2",
    "72 apples",
    "between 3 and 5",
    "(1,2)",
    "3 or 4",
    "five",
    "",
    None,
    "x = 5",
    r"2\sqrt{5}",
    "5x",
    "7:30",
]
NOT_PLAIN += ["1/2/2024", "1.000.000,50", "±5", "1e99999", [72, 73]]


@for_each("gold", NOT_PLAIN)
def test_a_gold_that_is_no_plain_number_is_named(gold):
    assert vars(exact_number)["row_fault"](answer=gold) == f"`answer` is no plain number: {gold!r}"
    assert len(vars(exact_number)["row_fault"](answer="no number " * 99)) < 120


HOSTILE = [
    "9",
    "1,",
    "000,",
    "1 ",
    "$",
    "-",
    "- ",
    "1e5 ",
    "1.",
    "1/",
    "1:",
    "^{",
    "_{",
    r"\frac{1}{",
    "1⅓",
    "a1.",
    "US$",
    "1 1/",
]
HOSTILE += ["1^{1", "1,00,", "\n", "1.2.3\n", "0x", "+/-", "1 000 ", r"\boxed{", "<answer>", "####"]


@for_each("part", HOSTILE)
def test_a_hostile_text_takes_linear_time(part):
    assert exact_number([part * (60_000 // len(part)) + "x"], answer=["72"]) == [0.0]
