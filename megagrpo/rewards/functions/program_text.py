"""Finds the program in a response: its fenced blocks, what a block defines, and which block is the program.

Each function takes time linear in the length of the text.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import warnings
from collections.abc import Iterator, Set
from dataclasses import dataclass

from megagrpo.rewards.functions.text_rewards import encodable
from megagrpo.rewards.math.answers import after_thought

PYTHON = ("", "python", "py", "python3", "py3")
_OPENS = re.compile(r"([ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(`{3,}|~{3,})[ \t{.]*([^`\s}]*)[^`]*")
_OPENS_AFTER_PROSE = re.compile(r"()(`{3,})[ \t]*(python3?|py3?)[ \t]*", re.IGNORECASE)
_CLOSES = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*(?:<.*)?")
_PROVIDED = frozenset(dir(builtins)) | {"__name__", "__file__", "exit", "quit"}


@dataclass(frozen=True)
class Outline:
    """What Python code binds at its top level (`defines`, with the methods of a class `Solution`), the names that it
    uses and never binds (`unbound`), and whether it calls something and binds all names that it uses (`is_whole`)."""

    defines: frozenset[str]
    unbound: frozenset[str]
    is_whole: bool


def outline(code: str) -> Outline | None:
    """Return the outline of Python code; None when the code does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "invalid escape sequence"
            tree = ast.parse(code)
            table = symtable.symtable(code, "<code>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None
    bound = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    used, methods = set[str](), set[str]()
    tables = [table]
    while tables:
        inner = tables.pop()
        tables += inner.get_children()
        for symbol in inner.get_symbols():
            if inner is not table and symbol.is_declared_global() and symbol.is_assigned():
                bound.add(symbol.get_name())
            if symbol.is_referenced() and (inner is table or symbol.is_global()):
                used.add(symbol.get_name())
        if inner.get_name() == "Solution" and inner.get_type() == "class":
            methods |= {s.get_name() for s in inner.get_symbols() if s.is_assigned() or s.is_namespace()}
    star = any(isinstance(n, ast.ImportFrom) and n.names[0].name == "*" for n in tree.body)
    unbound = used - bound - _PROVIDED
    calls = any(isinstance(n, ast.Call) for n in ast.walk(tree))
    return Outline(frozenset(bound | methods), frozenset(unbound), calls and (star or not unbound))


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language (lower case, "" without one) and content of each fenced block.

    A block ends at a fence of the same character that is at least as long, at the next fence with a language, or with
    the text. A fence inside a triple-quoted string does not end it.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    i = 0
    while i < len(lines):
        opened = _opening(lines[i])
        i += 1
        if opened is not None:
            indent, fence, language = opened
            content, i = _content(lines, i, fence)
            yield language, "\n".join(_dedent(line, indent) for line in content)


def _opening(line: str) -> tuple[int, str, str] | None:
    """Return indentation, fence and language when the line opens a block, else None."""
    match = _OPENS.fullmatch(line)
    if match is None and (end := line.rfind("`") + 1):  # "Answer: ```python"
        match = _OPENS_AFTER_PROSE.fullmatch(line[len(line[:end].rstrip("`")) :])
    return None if match is None else (len(match[1]), match[2], match[3].lower())


def _content(lines: list[str], begin: int, fence: str) -> tuple[list[str], int]:
    """Return the lines of a block that begins at line `begin`, and the index of the line after it."""
    in_quotes = {'"""': False, "'''": False}
    first: tuple[list[str], int] | None = None
    for i in range(begin, len(lines)):
        line = lines[i]
        end: tuple[list[str], int] | None = None
        closing, opening = _CLOSES.fullmatch(line), _OPENS.fullmatch(line)
        if closing is not None and closing[1].startswith(fence):
            end = lines[begin:i], i + 1
        elif opening is not None and opening[2][0] == fence[0] and opening[3]:
            end = lines[begin:i], i
        elif line.rstrip().endswith(fence) and not ({"`", "#"} & set(line.rstrip().rstrip(fence[0]))):
            end = [*lines[begin:i], line.rstrip().rstrip(fence[0])], i + 1  # "print(3)```"
        if end is not None and not any(in_quotes.values()):
            return end
        first = first or end
        for quote in in_quotes:
            in_quotes[quote] ^= bool(line.count(quote) % 2)
    # a string that never ends: the code is broken, so the first fence ends it
    return first or (lines[begin:], len(lines))


def _dedent(line: str, count: int) -> str:
    return line[min(count, len(line) - len(line.lstrip())) :]


def program_of(text: str, names: Set[str] = frozenset(), prefix: str = "", context: str = "") -> str | None:
    """Return a response's program; None without one. `names` are those that the tests call, empty for input and output.

    The candidates are the Python blocks that parse: fenced blocks without a language or with Python's, and the whole
    text without any fence. The program is the last candidate that defines the most of `names`. Without `names` it is
    the last block that calls something and binds all names that it uses, else the last candidate. A block that defines
    nothing of `names` may continue `context`, code that ends in a function without its body.
    """
    rest = after_thought(text, prefix)
    if rest is None:
        return None
    rest = encodable(rest)
    blocks = list(fenced_blocks(rest))
    codes = [code for language, code in blocks if language in PYTHON] if blocks else [_without_tags(rest)]
    best: tuple[tuple[int, bool], str] | None = None
    for code in reversed(codes):
        if code.strip() and (outlined := outline(code)) is not None:
            rank = len(names & outlined.defines), bool(names) or outlined.is_whole
            if best is None or rank > best[0]:
                best = rank, code
            if best[0] == (len(names), True):
                break
    if context and (best is None or not best[0][0]):
        for code in reversed(codes):
            for body in (code, "    " + code.lstrip()):
                if body[:1].isspace() and code.strip() and outline(whole := f"{context.rstrip()}\n{body}") is not None:
                    return whole
        return None
    return best and best[1]


def is_stub(code: str, name: str) -> bool:
    """Tell whether code ends in the function `name` without a body: with a docstring, `pass` or `...` only."""
    last = ast.parse(code).body[-1]
    is_empty = isinstance(last, ast.FunctionDef) and all(isinstance(s, (ast.Pass, ast.Expr)) for s in last.body)
    return is_empty and isinstance(last, ast.FunctionDef) and last.name == name


def _without_tags(text: str) -> str:
    """Return the content of the last <answer>...</answer>, else the whole text."""
    before, closed, _ = text.rpartition("</answer>")
    _, opened, inside = before.rpartition("<answer>")
    return inside if closed and opened else text
