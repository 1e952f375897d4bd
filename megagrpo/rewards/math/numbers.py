r"""The last number of a text, by value; docs/rewards.md#the-last-number states the rule. Imports only the standard
library.

A line is split from left to right into tokens: numbers, and names, exponents, dates or versions, whose digits are no
numbers. No token contains a line break, so reading starts at the last line. Each pattern takes linear time for any
text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from decimal import Context, Decimal

# Latin, Greek, Cyrillic: scripts with spaces between words
_LETTER = r"A-Za-z\u00aa\u00b5\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u052f"
_CURRENCY = r"$\u00a2-\u00a5\u0e3f\u20a0-\u20cf"
_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:[ '_]\d{3})+(?!\d)|\d{1,2}(?:,\d\d(?!\d)){1,9}+,\d{3}(?!\d)|\d++)"
_DECIMALS = r"(?:\.\d++)?+"
_EXPONENT = r"(?:\^[ ]?(?:\{[ ]?[-+]?\d++[ ]?\}|[-+]?\d++)|\*\*[-+]?\d++(?!\*)|[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]++)"
_PART = r"(?:\{[ ]?[-+]?\d++[ ]?\}|\d)"
_FRAC = rf"\\[dtc]?frac[ ]?{_PART}[ ]?{_PART}"
_ALONE = r"(?!\d|\.\d|[/^])"  # after a fraction: no date, no power

_TOKEN = re.compile(
    rf"""
      (?P<number> (?=[-.\\\dA-Z{_CURRENCY}])
        (?P<sign>-[ ]?)?
        (?P<money>(?:[A-Z]{{0,2}}[{_CURRENCY}]|(?:USD|EUR|GBP|INR|CNY|JPY|Rs)\.?)[ ]?(?P<late_sign>-[ ]?)?)?
        (?:
          (?P<digits>{_INTEGER}{_DECIMALS}|(?<![\w.])\.\d++)
          (?:
              (?P<other>(?:\.\d++)++(?:,\d++)?|(?<=\.\d{{3}}),\d++|(?::\d++)++|/\d++(?:/\d++)++|(?<=\d{{4}})-\d\d?-\d\d?(?!\d)
                  |(?<=(?<![\d.])0)[xXbBoO][0-9A-Fa-f]++\w*+)
            | [ ]?/[ ]?(?P<bottom>{_INTEGER}){_ALONE}
            | [ ]?(?P<rest>{_FRAC}|(?<=[ ])(?!0)\d++[ ]?/[ ]?\d++{_ALONE})
            | (?P<power>{_EXPONENT})
            | [eE](?P<e>[-+]?\d++)
            | [ ]?(?:[×⋅·*xX]|\\times|\\cdot)[ ]?10[ ]?(?P<ten>{_EXPONENT})
          )?
          (?:_\{{?\d++\}}?)?
        | (?P<frac>{_FRAC})
        )
      )
    | (?:±|\\[pm][pm](?![A-Za-z])|\+/-)[ ]?(?:{_FRAC}|[{_CURRENCY}]?{_INTEGER}{_DECIMALS})
    | \\[A-Za-z]++
    | [{_LETTER}][{_LETTER}_]*+(?:\d[{_LETTER}\d_]*+(?:\.\d++)*+|(?<=_)\{{[^{{}}]{{0,40}}\}})?+(?:\*\*\d++(?!\*))?
    | (?:\^|(?<=[^\W_])_|(?<=[)}}\]])_)[ ]?(?:\{{[^{{}}]{{0,40}}\}}|[-+]?\w++)
    """,
    re.VERBOSE,
)
_FRAC_PARTS = re.compile(rf"\\[dtc]?frac[ ]?({_PART})[ ]?({_PART})")
_SEPARATOR = re.compile("[, '_]")
_BESIDE = re.compile(rf"[\s.*_()\[\]{{}}\\\"'+%{_CURRENCY}]*")  # what may stand beside a plain number

_LATEX_SPACE = re.compile(r"\\[,;: ]|~")
_LATEX_NOTHING = re.compile(r"\\!|\\(?=[$%])|\{(?=,\})|(?<=\{,)\}")
_SAME: dict[int, int | str] = {c: c - 0xFEE0 for c in range(0xFF01, 0xFF5F)}  # full-width forms
_SAME |= dict.fromkeys(map(ord, "\u2212\u2013\u2010\u2011\ufe63\u2796"), "-") | dict.fromkeys(
    map(ord, "\u2044\u2215"), "/"
)
_SAME |= dict.fromkeys(map(ord, "\u00a0\u2007\u2009\u202f\u3000"), " ") | dict.fromkeys(map(ord, "\u2019\u02bc"), "'")
_SAME |= {0xFFE0: "¢", 0xFFE1: "£", 0xFFE5: "¥"}
_VULGAR = dict(
    zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "1/2 1/3 2/3 1/4 3/4 1/5 2/5 3/5 4/5 1/6 5/6 1/8 3/8 5/8 7/8".split(), strict=True)
)
_DIGIT = re.compile(rf"[\d{''.join(_VULGAR)}]")
_VULGAR_FRACTION = re.compile(rf"(\d ?)?([{''.join(_VULGAR)}])")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")

# a minus that follows at once subtracts, or joins two words
_AFTER_OPERAND = re.compile(rf"(?:[{_LETTER})\]}}%°-]|\d|[⁰¹²³⁴⁵⁶⁷⁸⁹])\Z")
_BEFORE_SIGN = re.compile(  # a minus with a space after it is a sign after these, after a relation and after a verb
    r"(?:[=(\[{<>≈≤≥≠≡:;,±×/^|+-]|\\(?:approx|sim|leq?|geq?|neq?|equiv|to|times|cdot|[Rr]ightarrow|implies)"
    r"|\b(?:is|are|was|equals?|gives|to|be))\Z"
)

# of both parts of a fraction, and of a power's base: two values are the same, or differ within 64 digits
_MAX_DIGITS = 20
_MAX_EXPONENT = 9999
_QUOTIENT, _POWER = Context(prec=64), Context(prec=99 * _MAX_DIGITS)


def last_number(text: str) -> Decimal | None:
    """Return the value of the last number in `text`, with all its digits; a fraction has 64. None without a number, and
    if the last one is a division by zero or beyond the limits on exponents."""
    backwards = text[::-1]
    digit = _DIGIT.search(backwards)
    while digit:
        index = len(text) - digit.end()
        begin, end = text.rfind("\n", 0, index) + 1, text.find("\n", index)
        line = _same(text[begin : end if end >= 0 else None])
        if token := _last(_numbers(line)):
            value = _value(token)
            if value is not None and _is_negative(token, line, not text[:begin].strip()):
                value = value.copy_negate()
            return value
        digit = _DIGIT.search(backwards, len(text) - begin)
    return None


def only_number(text: str) -> Decimal | None:
    """Return the value of the number in `text`; None if `text` has none or several."""
    count = sum(1 for line in text.split("\n") for _ in _numbers(_same(line)))
    return last_number(text) if count == 1 else None


def is_plain(text: str) -> bool:
    """Return whether `text` is one number, with nothing else but a currency or percent sign, brackets, punctuation."""
    line = _same(text.strip())
    if only_number(line) is None:
        return False
    (token,) = _numbers(line)
    return _BESIDE.fullmatch(line[: token.start()] + line[token.end() :]) is not None


def number_text(value: Decimal) -> str:
    """Return the digits of `value`, without an exponent and without final zeros: "1000", "0.5"."""
    digits = f"{value:f}"
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if digits == "-0" else digits


def _same(line: str) -> str:
    """Return the line with one character for each kind of minus, space, slash and digit, without LaTeX's spacing."""
    if not line.isascii():
        line = _VULGAR_FRACTION.sub(
            lambda m: f"{m[1]} {_VULGAR[m[2]]}" if m[1] else _VULGAR[m[2]], line.translate(_SAME)
        )
    if "\\" in line or "~" in line or "{," in line:
        line = _LATEX_NOTHING.sub("", _LATEX_SPACE.sub(" ", line))
    return line


def _numbers(line: str) -> Iterator[re.Match[str]]:
    return (token for token in _TOKEN.finditer(line) if token["number"] and not token["other"])


def _last(matches: Iterator[re.Match[str]]) -> re.Match[str] | None:
    return next(iter(deque(matches, maxlen=1)), None)


def _value(token: re.Match[str]) -> Decimal | None:
    """Return a number's value without sign; None for division by zero or beyond the limits on digits and exponents."""
    if fraction := token["frac"] or token["rest"]:
        top, bottom = _parts(fraction)
        return _quotient(top, bottom, token["digits"] or "")
    digits = _SEPARATOR.sub("", token["digits"])
    if token["bottom"]:
        return _quotient(digits, _SEPARATOR.sub("", token["bottom"]))
    if token["power"]:
        return _power(digits, _exponent(token["power"]))
    exponent = _exponent(token["e"] or token["ten"] or "0")
    return Decimal(f"{digits}e{exponent}") if abs(exponent) <= _MAX_EXPONENT else None


def _exponent(text: str) -> int:
    """Return the integer in `-3`, `^3`, `^{-3}`, `**3` or a superscript; of a longer one only that it is beyond every
    limit."""
    return int(text.translate(_SUPERSCRIPTS).strip("^*{} ")[:8])


def _power(base: str, exponent: int) -> Decimal | None:
    if base == "10":
        return Decimal(f"1e{exponent}") if abs(exponent) <= _MAX_EXPONENT else None
    number = Decimal(base)
    if not number or abs(exponent) > 99 or len(base) > _MAX_DIGITS:
        return None
    power = _POWER.power(number, abs(exponent))
    return _QUOTIENT.divide(Decimal(1), power) if exponent < 0 else power


def _parts(fraction: str) -> list[str]:
    match = _FRAC_PARTS.match(fraction)
    return [part.strip("{} ") for part in match.groups()] if match else fraction.split("/")


def _quotient(top: str, bottom: str, whole: str = "") -> Decimal | None:
    """Return top / bottom. `whole` is added to a fraction below 1: "2 1/2" is 2.5, but "5 3/2" ends in 1.5."""
    if max(map(len, (top, bottom, whole))) > _MAX_DIGITS or not (below := Decimal(bottom)):
        return None
    above = Decimal(top)
    if whole.isdecimal() and 0 <= above < below:
        above = _QUOTIENT.fma(Decimal(whole), below, above)
    return _QUOTIENT.divide(above, below)


def _is_negative(token: re.Match[str], line: str, is_first: bool) -> bool:
    """Return whether the minus before a number is a sign, and not a subtraction, a dash or the mark of a list."""
    if token["late_sign"]:  # "$-5" is negative; "5$ - 3" and "$x$-3" are not
        return _AFTER_OPERAND.search(line[: token.start("money")]) is None
    if not token["sign"]:
        return False
    before = line[: token.start()]
    if token["sign"] == "-":
        return _AFTER_OPERAND.search(before[-1:]) is None
    if before.endswith(tuple("$*_`\"'")):  # the opening mark of LaTeX, Markdown or a quotation
        return True
    before = before.rstrip()
    return is_first if not before else _BEFORE_SIGN.search(before[-20:]) is not None
