"""The calculator tool: arithmetic evaluated on Python's syntax tree; nothing is executed as code."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

MAX_EXPRESSION_LENGTH = 500  # characters of an expression
MAX_BITS = 4096  # limit on the bits of integers, intermediate results included
_BINARY: dict[type[ast.operator], Callable[[float, float], int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], int | float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., int | float]] = {
    "sqrt": math.sqrt,
    "abs": abs,
    "round": lambda number, digits=0: round(number, min(max(digits, -15), 15)),
    "min": min,
    "max": max,
    "floor": math.floor,
    "ceil": math.ceil,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % **, parentheses, sqrt, abs, round, min, max, floor, ceil, pi and e, such
            as "(3 + 4) * 12".

    Returns:
        The result as text.
    """
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ValueError(f"the expression has more than {MAX_EXPRESSION_LENGTH} characters")
    text = expression.replace("^", "**").replace("\N{MULTIPLICATION SIGN}", "*").replace("\N{DIVISION SIGN}", "/")
    if not re.search("[a-z]", text):  # the comma of max(1,200) is not a thousands separator
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"not an arithmetic expression: {expression!r}") from None
    return _text(_value(tree.body))


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _checked(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _checked(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _checked(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _checked(_FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"not arithmetic: {ast.unparse(node)[:100]}")


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) * base.bit_length() > MAX_BITS:
        raise ValueError(f"{base} ** {exponent} has too many digits")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError(f"{base} ** {exponent} is not a real number")
    return result


def _checked(number: float) -> float:
    if isinstance(number, int) and number.bit_length() > MAX_BITS:
        raise ValueError("the result has too many digits")
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError("the result is not finite")
    return number


def _text(number: float) -> str:
    if isinstance(number, float) and number.is_integer() and abs(number) < 1e15:
        number = int(number)
    return str(number) if isinstance(number, int) else f"{number:.12g}"
