r"""Compares two expressions or equations: rational numbers exactly, everything else by math-verify.

math-verify's mistakes are mended before it: it rounds decimals, reads `2i` as a real symbol, and hangs on power towers.
"""

from __future__ import annotations

import ast
import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from math_verify.utils import timeout
from sympy import Eq, Expr, I, Rational, Symbol

# Without math-verify's own list of units, which has most single letters: 2m would be 2.
_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
_CONFIG = [LatexExtractionConfig(normalization_config=_NORMALIZATION)]
_SECONDS = 2  # of one parse or comparison by sympy
_MAX_BITS = 100_000  # of an exact power
_MAX_TEXT = 400  # characters that math-verify reads
_MIXED = re.compile(r"(?<![\w.}^])(\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}|(?<![\w./^}])(\d+)\s+(\d+)/(\d+)(?![\d/.])")
_DOTS = re.compile(r"(\d*)\.(\d{0,12}?)(\d{1,6}?)\3{2,}\.\.\.")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?![\w.])")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:([, ])\d{3})(?:\1\d{3})*(?![\d,])")
_ODD_ROOT = re.compile(r"\\sqrt\s*\[\s*([3579])\s*\]\s*\{\s*-([^{}+-]*)\}")
_DECIMAL = re.compile(r"(\d*)\.(\d+)|(?<=\d)\.(?!\d)")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_BINOMIAL = re.compile(r"\\binom\s*\{\s*(\d{1,4})\s*\}\s*\{\s*(\d{1,4})\s*\}")
_PRODUCT = re.compile(r"(?<=[\d)!])\s*(?=\()|(?<=[)!])\s*(?=\d)")
_FACTORIAL = re.compile(r"(\d+|\([\d*+ -]*\))!")
_ARITHMETIC = re.compile(r"[\d+\-*/() f]+")
# Texts that sympy computes for hours: a power of a power, a factorial of a large number or of a factorial, a large
# power, exp of exp.
_ENDLESS = re.compile(
    r"\^[^+,=-]*\^|!\s*[)}]*\s*!|\d{5}\s*[)}]*\s*!|\^\s*\{?\s*-?\d{4}|[xyz)]\s*\^\s*\{?\s*\d{3}|\d{40}\s*[)}]*\s*\^"
    r"|(?:\\(?:exp|sinh|cosh)|\^).*\\(?:exp|sinh|cosh)|\\(?:exp|sinh|cosh).*\^|\\binom\W*\d{5}"
)
_DEGREES, _RADIANS = re.compile(r"(\d+|\\frac\{\d+\}\{\d+\})\s*°"), r"(\\frac{\1\\pi}{180})"
_LETTER_I = re.compile(r"(?<=[\d)}])\s*i(?![A-Za-z])")


class UnreadableError(ValueError):
    """math-verify cannot read a text, or must not try."""


def same_value(one: str, other: str) -> bool:
    """Whether two expressions or equations in the notation of `plain` are equal. Raises UnreadableError."""
    numbers = exact(one), exact(other)
    if None not in numbers:
        return numbers[0] == numbers[1]
    gold, answer = _parsed(one), _parsed(other)
    try:
        known = timeout(_SECONDS)(_quick_verdict)(gold, answer)
    except TimeoutException:
        known = False
    if known is not None:
        return known
    return bool(verify([gold], [answer], float_rounding=15, numeric_precision=30, timeout_seconds=_SECONDS))


@lru_cache(maxsize=4096)
def exact(text: str) -> Fraction | None:
    """Return the value of arithmetic with rational numbers; None for any other text, and for one that is too large."""
    text = _BINOMIAL.sub(lambda m: str(math.comb(int(m[1]), int(m[2]))), rewritten(text))
    for _ in range(9):
        text, count = _FRACTION.subn(r"((\1)/(\2))", re.sub(r"\^\s*\{([^{}]*)\}", r"^(\1)", text))
        if not count:
            break
    text = re.sub(r"\\(?:times|cdot|ast)(?![A-Za-z])", "*", text.replace(r"\div", "/")).replace("^", "**")
    text = _PRODUCT.sub("*", text.replace("{", "(").replace("}", ")").replace("[", "(").replace("]", ")"))
    text = re.sub(r"(?<!\d)0+(?=\d)", "", _FACTORIAL.sub(r"f(\1)", text)).strip()
    if len(text) > _MAX_TEXT or not _ARITHMETIC.fullmatch(text):
        return None
    try:
        return _computed(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _computed(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.UnaryOp(op=op, operand=operand):
            return _computed(operand) * (-1 if isinstance(op, ast.USub) else 1)
        case ast.Call(func=ast.Name(id="f"), args=[argument]) if (
            n := _computed(argument)
        ).denominator == 1 and 0 <= n <= 5000:
            return Fraction(math.factorial(n.numerator))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _computed(left), _computed(right)
            if isinstance(op, ast.Pow):
                size = max(a.numerator.bit_length(), a.denominator.bit_length()) * abs(b.numerator)
                if b.denominator != 1 or size > _MAX_BITS:
                    raise ValueError("not rational, or too large")
                return a**b.numerator
            return {ast.Add: a.__add__, ast.Sub: a.__sub__, ast.Mult: a.__mul__, ast.Div: a.__truediv__}[type(op)](b)
    raise ValueError("no arithmetic")


def rewritten(text: str) -> str:
    """Return the text with mixed numbers as sums, and with decimals, which math-verify rounds, as fractions."""
    text = _ODD_ROOT.sub(r"(-\\sqrt[\1]{\2})", text)
    text = _THOUSANDS.sub(lambda m: m[0].replace(m[1], ""), text)
    text = _DOTS.sub(r"\1.\2\\overline{\3}", text)
    text = _REPEATING.sub(
        lambda m: f"({m[1] or 0}{m[2]}{m[3]}-{m[1] or 0}{m[2]})/{(10 ** len(m[3]) - 1) * 10 ** len(m[2])}", text
    )
    text = _MIXED.sub(
        lambda m: rf"(\frac{{{int(m[1] or m[4]) * int(m[3] or m[6]) + int(m[2] or m[5])}}}{{{m[3] or m[6]}}})", text
    )
    text = _SCIENTIFIC.sub(r"(\1*10^{\2})", text)
    return _DECIMAL.sub(lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{1{'0' * len(m[2])}}}" if m[2] else "", text)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    if len(text) > _MAX_TEXT or _ENDLESS.search(text):
        raise UnreadableError(text)
    parsed = parse(
        f"${_LETTER_I.sub(' i', _DEGREES.sub(_RADIANS, rewritten(text)))}$",
        extraction_config=_CONFIG,
        fallback_mode="no_fallback",
    )
    if not parsed:
        raise UnreadableError(text)
    # math-verify leaves the imaginary unit as a symbol.
    return parsed[0].subs(Symbol("i", real=False), I)


def _at(expressions: tuple[Expr, Expr], shift: int) -> list[Any]:
    """Return the values of two expressions for one choice of their variables' values."""
    names = sorted(expressions[0].free_symbols | expressions[1].free_symbols, key=str)
    point = {name: Rational(13 + 4 * i + shift, 11 + i) for i, name in enumerate(names)}
    return [expression.subs(point).evalf(30) for expression in expressions]


def _quick_verdict(gold: Any, answer: Any) -> bool | None:
    """Return False for expressions with clearly different values, which spares `verify` a long simplification, and True
    for equations of which one is a multiple of the other, as "2x = 6" of "x = 3"; None if `verify` must tell."""
    try:
        if isinstance(gold, Expr) and isinstance(answer, Expr):
            a, b = _at((gold, answer), 0)
            return False if abs(a - b) > 1e-9 * (1 + abs(a)) else None
        if isinstance(gold, Eq) and isinstance(answer, Eq) and gold.free_symbols == answer.free_symbols:
            sides = gold.lhs - gold.rhs, answer.lhs - answer.rhs
            (a, b), *others = (_at(sides, shift) for shift in (0, 7, 31))
            return True if all(abs(x) > 1e-9 and abs(x * b - a * y) < 1e-20 * abs(x * b) for x, y in others) else None
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError, RecursionError):
        pass
    return None
