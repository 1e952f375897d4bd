"""Separates a quantity's unit from its value, and compares units: "12 km" is "12 kilometers", "12000 m", not "12 m"."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import batched
from typing import NamedTuple

# A unit's short name, then its other names; a plural s may follow each.
_NAMES = {
    line.split()[0]: line.split()
    for line in """
        km kilometer kilometre, m meter metre, cm centimeter centimetre, mm millimeter millimetre, in inch inches,
        ft foot feet, yd yard, mi mile, kg kilogram kilo, g gram gm, mg milligram, lb pound, oz ounce, l liter litre,
        ml milliliter millilitre, gallon gal, acre, hectare ha, h hour hr, min minute, s second sec, day, week wk,
        month, year yr, am a.m., pm p.m., mph, kph kmh kmph, degree deg °, radian rad, dollar usd buck, cent,
        euro eur, yen, rupee rs, unit, % percent percentage pct, j joule, n newton, w watt, v volt, a ampere amp,
        k kelvin, hz hertz, pa pascal, mol mole, ohm, dozen
    """.split(",")
}
# A unit that people exchange -> its size in another one, and that one ("": a number).
_SIZES = {
    unit: (size, base)
    for base, units in {
        "m": "km 1000 cm 1/100 mm 1/1000",
        "s": "min 60 h 3600 day 86400 week 604800",
        "g": "kg 1000 mg 1/1000",
        "l": "ml 1/1000",
        "dollar": "cent 1/100",
        "in": "ft 12 yd 36 mi 63360",
        "": r"% 1/100 degree \pi/180 radian 1 dozen 12",
    }.items()
    for unit, size in batched(units.split(), 2)
}
_KNOWN = {word: unit for unit, words in _NAMES.items() for word in words}
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
_TEXTS = re.compile(r"((?:\s*(?:\\text\s*\{[^{}]*\}|\\(?:frac|cdot|times|per)\b|[/*])\s*(?:\^\s*\{?\s*-?\d\}?)?)+)$")
_PLAIN = re.compile(
    r"(?<=[\d}!)\]\s%])\s*((?:[A-Za-z.]{2,}|(?<=\s)[mgshlLNJWVAK])(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
    r"(?:\s*[/*]\s*[A-Za-z]+(?:\s*\^\s*\{?\s*-?\d\s*\}?)?|\s+[A-Za-z.-]+(?:\s*\^\s*\{?\s*-?\d\s*\}?)?)*)$"
)
_MONEY = re.compile(r"^([-+]?)\s*\\money\{(\w+)\}\s*|\\money\{(\w+)\}\s*$")
_SIGN = re.compile(r"\s*(%|°\s*(?:\\text\s*\{\s*)?[CF]?(?:\s*\})?)$")
_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_MODULO = re.compile(r"\\p?mod\b.*$|\(\s*\\?mod\b.*\)$")
_BASE = re.compile(r"(?<=[\dA-F)])\s*_\s*(?:\{\s*(?:\\text\{)?\s*([\w ]+?)\s*\}?\s*\}|(\d+|[A-Za-z]))$")


class Quantity(NamedTuple):
    """`value` is the text without its unit; `unit` is the unit by its short name, "" without one."""

    value: str
    unit: str


@lru_cache(maxsize=4096)
def quantity(text: str) -> Quantity:
    """Return the value and the unit of a text in the notation of `plain`."""
    text = text.strip()
    if match := _MONEY.search(text):
        rest = text[: match.start()] + (match[1] or "") + text[match.end() :]
        return Quantity(quantity(rest).value, _singular(match[2] or match[3]))
    if (match := _SIGN.search(text)) and match.start() and not ("°" in match[1] and _ANGLE_FUNCTION.search(text)):
        sign = re.sub(r"[^%°CF]", "", match[1])
        return Quantity(text[: match.start()], {"°": "degree"}.get(sign, sign))
    if (match := _MODULO.search(text)) and match.start():
        return Quantity(text[: match.start()], re.sub(r"[\s\\{}()]|pmod|mod", "", match[0]))
    if match := _BASE.search(text):
        digits = text[: match.start()].strip()
        return Quantity(
            digits[1:-1] if digits.startswith("(") and digits.endswith(")") else digits, f"base {match[1] or match[2]}"
        )
    if (match := _TEXTS.search(text)) and "text" in match[1] and match.start() and not text[: match.start()].isalpha():
        return Quantity(text[: match.start()], _canonical(match[1]))
    if (match := _PLAIN.search(text)) and re.search(r"\d|\\pi|\\infty", text[: match.start(1)]):
        words = match[1].strip()
        first = re.split(r"[\s^/*]", words)[0]
        if (
            _singular(first) in _NAMES
            or first.lower() in _POWERS
            or (text[match.start(1) - 1] == " " and len(first) > 2)
        ):
            return Quantity(text[: match.start(1)].strip(), _canonical(words))
    return Quantity(text, "")


def _singular(word: str) -> str:
    word = word.lower()
    known = word if word in _KNOWN else word.removesuffix("s")
    return _KNOWN.get(known, known if len(word) > 3 else word)


def _canonical(text: str) -> str:
    """Return a unit's short name: "square meters" is "m^2", "km per hour" is "km/h"."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).replace(r"\cdot", "*").replace(r"\per", "/")
    names: list[str] = []
    power = ""
    for word in re.findall(r"[A-Za-z%°]+|\^\s*\{?\s*-?\d|[/*]", text):
        lower = word.lower()
        if lower in ("per", "/", "an"):
            names.append("/")
        elif word[0] == "^" or lower in ("squared", "cubed"):
            names.append("^" + _POWERS.get(lower, word.strip("^{ ")))
        elif lower in _POWERS:
            power = f" ^{_POWERS[lower]}"
        else:
            names.append(_singular(word) + power)
            power = ""
    joined = " ".join(names).replace(" / ", "/").replace(" ^", "^").replace("* ", "")
    return {"mi/h": "mph", "km/h": "kph"}.get(joined, joined)


def in_base_unit(value: str, unit: str) -> tuple[str, str]:
    """Return an expression and unit in a common unit: 2 km^2 is (2)(1000)^2 m^2. Units of one kind share one."""
    if unit.startswith("dozen "):
        return f"({value})*(12)", unit.removeprefix("dozen ")
    name, _, power = unit.partition("^")
    size, base = _SIZES.get(name, ("1", name))
    if base == name:
        return value, unit
    return f"({value})*({size})^{{{power or 1}}}", base + (f"^{power}" if power else "")


def same_unit(one: str, other: str) -> bool:
    """Whether two units, by short names, are the same. One of "clips" and "clips sold" may have fewer words."""
    if one == other:
        return True
    words, others = set(one.split()), set(other.split())
    if any(word.split("^")[0].split("/")[0] in _NAMES for word in words | others):
        return False
    return words <= others or others <= words
