r"""Rewrites numbers in words to digits: "2.5 million", "three hundred and five", "two thirds", "22nd".

Imports only the standard library.
"""

from __future__ import annotations

import re
from decimal import Context, Decimal

_ONES = {
    word: value
    for value, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen".split()
    )
}
_TENS = {
    word: 10 * value
    for value, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), start=2)
}
_SCALES = {
    **{"hundred": 2, "thousand": 3, "lakh": 5, "million": 6, "mn": 6, "crore": 7, "billion": 9, "bn": 9},
    **{"trillion": 12, "quadrillion": 15, "quintillion": 18, "sextillion": 21},
}
_PARTS = {
    **{"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7},
    **{"eighth": 8, "ninth": 9, "tenth": 10, "twelfth": 12, "hundredth": 100, "thousandth": 1000},
}
_ORDINALS = {"first": 1, "second": 2} | {word: value for word, value in _PARTS.items() if word not in ("half", "halve")}
del _ORDINALS["quarter"]

_SCALE = rf"(?:{'|'.join(_SCALES)})s?(?![A-Za-z])"
_SCALED = re.compile(
    rf"(?:(?<![\w.,])(?P<digits>\d+(?:\{{?,\}}?\d{{3}})*(?:\.\d+)?|\.\d+)|(?<=\d\}}))[ -]*"
    rf"(?P<text>\\text\s*\{{\s*)?(?P<scales>{_SCALE}(?: {_SCALE})*)",
    re.IGNORECASE,
)
_EXACT = Context(prec=4000)  # digits, more than any answer has
_GAP = r"[ -]+"
_SMALL = rf"(?:(?:{'|'.join(_TENS)})(?:{_GAP}(?:{'|'.join([*_ONES][1:10])})(?![A-Za-z]))?|{'|'.join(reversed(_ONES))})"
_LARGE = "(?:hundred|thousand|million|billion|trillion)(?![A-Za-z])"
_SPELLED = re.compile(
    rf"(?P<sign>minus |negative )?(?:(?:(?P<top>{_SMALL}|an?){_GAP})?(?P<part>{'|'.join(_PARTS)})s?(?= of |$)"
    rf"|(?P<whole>(?:{_SMALL}|an?(?= {_LARGE}| dozen))(?![A-Za-z])"
    rf"(?:{_GAP}{_LARGE}(?:,? (?:and )?{_SMALL}(?![A-Za-z]))?)*)"
    rf"(?P<half> and a half(?: (?P<scale>{_SCALE}))?)?)"
    r"(?P<unit>$|(?= ?[%\\])| (?!(?:and|or|to|by|over|times|plus|minus|point)\b)(?=(?-i:[a-z])))",
    re.IGNORECASE,
)
_ORDINAL = re.compile(
    rf"(?:the )?(?:(\d*(?:1[123]th|(?<!1)(?:1st|2nd|3rd)|[04-9]th))(?= (?-i:[a-z])|$)|({'|'.join(_ORDINALS)})$)",
    re.IGNORECASE,
)
_RAISED = re.compile(
    r"(?<=\d)(?:\^\s*)?(?:\{\s*)?\\text\s*\{\s*(st|nd|rd|th)\s*\}\s*\}?|(?<=\d)\^\s*\{\s*(st|nd|rd|th)\s*\}"
)


def with_scales(text: str) -> str:
    r"""Return the text with "2.5 million" as "2500000", and `\frac{1}{2} million` as a product."""
    return _SCALED.sub(_scaled, text)


def _scaled(match: re.Match[str]) -> str:
    power = sum(_SCALES[word.lower().removesuffix("s")] for word in match["scales"].split())
    digits, opened = match["digits"], match["text"] or ""
    if digits is None:
        return rf"\times 1{'0' * power}{opened}"
    return f"{Decimal(re.sub('[{},]', '', digits)).scaleb(power, _EXACT):f}{opened}"


def in_digits(text: str) -> str:
    """Return an answer whose number is spelled, with or without a unit, in digits; any other text unchanged.

    "three hundred and five apples" is "305 apples", "two thirds" a fraction, and "22nd" or "third" a whole number.
    """
    words = _RAISED.sub(lambda m: m[1] or m[2], text)
    if ordinal := _ORDINAL.match(words):
        value = ordinal[1][:-2] if ordinal[1] else str(_ORDINALS[ordinal[2].lower()])
        return value + words[ordinal.end() :]
    if (match := _SPELLED.match(words)) is None:
        return text
    sign = "-" if match["sign"] else ""
    if match["part"]:
        number = rf"\frac{{{_whole(match['top'] or 'a')}}}{{{_PARTS[match['part'].lower()]}}}"
        return f"{sign}{number}{match['unit']}{words[match.end() :]}"
    value = Decimal(_whole(match["whole"])) + (Decimal("0.5") if match["half"] else 0)
    power = _SCALES[match["scale"].lower().removesuffix("s")] if match["scale"] else 0
    return f"{sign}{value.scaleb(power, _EXACT):f}{match['unit']}{words[match.end() :]}"


def _whole(words: str) -> int:
    """Return the value of "two hundred and five thousand"."""
    total, below = 0, 0
    for word in re.findall("[a-z]+", words.lower()):
        if word in ("a", "an"):
            below += 1
        elif word == "hundred":
            below *= 100
        elif word in _SCALES:
            total, below = total + below * 10 ** _SCALES[word], 0
        elif word != "and":
            below += _ONES.get(word, 0) + _TENS.get(word, 0)
    return total + below
