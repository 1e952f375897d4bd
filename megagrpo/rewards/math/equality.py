"""Decides if mathematical answers are equal: words, lists, sets, tuples, intervals, matrices, equations, quantities.

Structure is compared here, each expression and equation in `compare_expressions`. docs/answers.md states the rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from megagrpo.rewards.math.compare_expressions import UnreadableError, exact, same_value
from megagrpo.rewards.math.notation import plain
from megagrpo.rewards.math.number_words import in_digits
from megagrpo.rewards.math.units import in_base_unit, quantity, same_unit

MAX_ANSWER_LENGTH = 3000  # characters of an answer that is read as mathematics; a longer one is compared as text
_MAX_ITEMS, _MAX_DEPTH, _MAX_NESTING = 50, 12, 40
_THOUSANDS = re.compile(r"[^,;]*?\d{1,3}(,\d{3})+(?![\d,])[^,;]*")
_COMMA = re.compile("[,;]")
_SEPARATOR = re.compile(r"[,;]|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b|\\(?:lor|land|vee|wedge)(?![A-Za-z])")
# beside an answer with this variable
_ANY_NUMBER = re.compile(r"(?:for )?(?:any |all )?([a-z])\s*\\in\s*\\mathbb\s*\{?\s*([ZRNQC])\s*\}?")
_FOR_ALL = re.compile(
    r"[\s,;(]*(?:\\text\s*\{[\s,(]*)?(?:\bfor (?:all|any|every|each|arbitrary)\b|\\forall(?![A-Za-z])"
    r"|(?:\b(?:where|with|for)\b\s*\}?\s*|\()(?=[a-z]\s*\\in\s*\\mathbb))([^=]*)$"
)
_DOMAIN = re.compile(r"positive|negative|non|zero|even|odd|prime|[<>]|\\(?:le|ge|ne)(?![A-Za-z])|[-+\d.]+")
_UNION = re.compile(r"\\(?:big)?cup(?![A-Za-z])|(?<=[\])])\s*[uU]\s*(?=[(\[])")
_SET_SIGN = re.compile(r"\\(?:cup|cap|setminus|mathbb)(?![A-Za-z])")
_SIGNS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx|equiv|simeq|sim|cong)(?![A-Za-z])|[<>=]")
_APPROXIMATE = {r"\approx", r"\simeq", r"\sim"}
_FLIPPED = {">": "<", r"\ge": r"\le"}
_MATRIX = re.compile(
    r"([^(\[=<>,;&]*?)[(\[]?\s*\\begin\{([a-zA-Z]*matrix|array|cases)\}(?:\{[^{}]*\})?(.*)\\end\{\2\}\s*[)\]]?",
    re.DOTALL,
)
_ROW, _CELL = re.compile(r"\\\\(?:\[[^\]]*\])?|\\cr(?![A-Za-z])"), re.compile("&")
_REALS = re.compile(
    r"(?:[A-Za-z] *\\in *)?\\mathbb *\{? *R *\}?(?: *(?:\\setminus|\\backslash|-) *\\\{([^{}]*)\\\})?|[A-Za-z] *\\ne "
    r"*([^<>=\\,]+)"
)
_NAME = re.compile(
    r"\\?[A-Za-z]+(?:\{[A-Za-z ]*\})?(?: [A-Za-z]+)*\s*(?:_\s*(?:\w|\{[^{}]*\})|\^\s*\{?\s*-1\}?|')*\s*(?:\([^()=]*\))?"
    r"|\|?(?:m\s*)?(?:\\(?:angle|triangle|overline)\s*)?\{?[A-Z]*\}?\|?|\(\s*[A-Za-z](?:_\w)?(?:\s*,\s*[A-Za-z](?:_\w)?)*\s*\)"
)
_CHOICE = re.compile(r"(?:\(([A-Ja-j])\)|([A-J])(?=[.):]|$)[.):]?|^([a-j])\)?$)\s*(.*)", re.DOTALL)
_CHOICE_NAME = re.compile(
    r"\s*(?:the )?(?:correct )?(?:option|choice|answer|alternative)s?\b(?: is\b)?[\s:]*(?=\(?[A-Ja-j](?![A-Za-z0-9]))",
    re.IGNORECASE,
)
_BETWEEN_CHOICES = r"(?:^|[,;/&]|\band\b|\bor\b)\s*"
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_PAIRS = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle", "{": "}"}
_BRACKET = re.compile(r"\\[{}]|\\[lr]angle(?![A-Za-z])|\\begin\{|\\end\{|\\.|[()\[\]{}]", re.DOTALL)
_DATE, _TIME = re.compile(r"\d{4}-\d{2}-\d{2}.*"), re.compile(r"\d{1,2}:\d{2}(?::\d{2})?")
_WORD = re.compile(r"[A-Za-z]{3,}|[A-Za-z]{2,}(?: [A-Za-z]+)+|no|on", re.IGNORECASE)


@dataclass(frozen=True)
class Node:
    """The outer structure of an answer. `kind` is list, set, tuple, matrix, relation or value; `parts` are its texts.

    `marks` are the brackets of a tuple or interval, the number of columns of a matrix, the signs of a relation. `name`
    is the variable of an interval that was an inequality.
    """

    kind: str
    parts: tuple[str, ...]
    marks: tuple[str, ...] = ()
    name: str = ""


def equal(gold: str, answer: str) -> bool:
    """Whether `answer` equals `gold`, by docs/answers.md. Takes any text; an unreadable one is compared as text."""
    if max(len(gold), len(answer)) > MAX_ANSWER_LENGTH:
        return bool(gold.strip()) and _squeezed(gold) == _squeezed(answer)
    one, other = _plain(gold), plain(answer)
    if not one or _squeezed(one) == _squeezed(other):
        return bool(one)
    return bool(other) and max(map(_nesting, (one, other))) <= _MAX_NESTING and _same(one, other)


_plain = lru_cache(maxsize=1024)(plain)


def _words(text: str) -> str:
    return _TEXT.sub(r"\1", text).strip()


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", _words(text))


def _same(gold: str, answer: str, depth: int = 0) -> bool:
    """Compare two texts in the notation of `plain`."""
    gold, answer = (match[1] if (match := _TEXT.fullmatch(text)) else text for text in (gold, answer))
    if depth > _MAX_DEPTH or _squeezed(gold) == _squeezed(answer):
        return depth <= _MAX_DEPTH
    gold, answer = _without_domains(in_digits(gold), in_digits(answer))
    if (choice := _same_choice(gold, answer, depth)) is not None:
        return choice
    one, other = _read(gold), _read(answer)
    pairs = [(one, other)]
    # "1,000" is a number, and a list only beside a list that is not a number.
    if one.kind == "list" and _THOUSANDS.fullmatch(answer):
        pairs.append((one, _read(answer, thousands=False)))
    if other.kind == "list" and _THOUSANDS.fullmatch(gold):
        pairs.append((_read(gold, thousands=False), other))
    if any(_same_nodes(*pair, depth + 1) for pair in pairs):
        return True
    return bool(_SET_SIGN.search(gold) or _SET_SIGN.search(answer)) and _same_leaves(gold, answer)


def _without_domains(gold: str, answer: str) -> tuple[str, str]:
    """Return two texts without "for all real x" at their end, unless both name different domains."""
    ends = [match if match and match.start() else None for match in map(_FOR_ALL.search, (gold, answer))]
    if all(ends) and len({tuple(_DOMAIN.findall(match[1])) for match in ends if match}) > 1:
        return gold, answer
    one, other = (text[: end.start()] if end else text for text, end in zip((gold, answer), ends, strict=True))
    return one, other


def _choice(text: str) -> re.Match[str] | None:
    """Return the match of one choice of a question, as "(A)", "A. text" or "Option A"; None for other texts."""
    match = _CHOICE.fullmatch(_CHOICE_NAME.sub("", _words(text), count=1))
    if match is None:
        return None
    other = r"\([A-J]\)" if match[1] else r"[A-J][.):](?:\s|$)"
    return None if re.search(_BETWEEN_CHOICES + other, match[4]) else match


def _same_choice(gold: str, answer: str, depth: int) -> bool | None:
    """Whether two letters of a multiple-choice question are the same; None if the texts are no choices."""
    one, other = map(_choice, (gold, answer))
    if one and other:
        letters = {(match[1] or match[2] or match[3]).upper() for match in (one, other)}
        if len(letters) == 1 or not (one[3] and other[3]):
            return len(letters) == 1
    beside = [(match[4], text) for match, text in ((one, answer), (other, gold)) if match and match[4]]
    return any(_same(*pair, _MAX_DEPTH - 2) for pair in beside) or None if depth < _MAX_DEPTH - 2 else None


@lru_cache(maxsize=4096)
def _read(text: str, thousands: bool = True) -> Node:
    """Return the outermost structure of a text."""
    text = text.strip()
    if _SIGNS.search(text):
        signs = ("+", "-"), ("-", "+")
        return Node("list", tuple(text.replace(r"\pm", up).replace(r"\mp", down) for up, down in signs))
    if (outward := re.fullmatch(r"([\]\[])([^\[\]]*)([\]\[])", text)) and outward[1] + outward[3] != "[]":
        # "]0, 1]" is "(0, 1]"
        text = ("(" if outward[1] == "]" else "[") + outward[2] + (")" if outward[3] == "[" else "]")
    if len(parts := _split(text, _UNION)[0]) > 1:
        return Node("list", parts)
    if not (thousands and _THOUSANDS.fullmatch(text)) and len(parts := _split(text, _SEPARATOR)[0]) > 1:
        parts = tuple(part for part in parts if part and not _is_domain(part, parts))
        return _read(parts[0]) if len(parts) == 1 else Node("list", parts)
    return _matrix_or_reals(text) or _bracketed(text) or _relation(text)


def _is_domain(part: str, parts: tuple[str, ...]) -> bool:
    """Whether a part is "k \\in \\mathbb{Z}" beside another part; of other sets only with that part's variable."""
    match = _ANY_NUMBER.fullmatch(part)
    return match is not None and (match[2] == "Z" or any(match[1] in other for other in parts if other != part))


def _matrix_or_reals(text: str) -> Node | None:
    """Return a matrix with its number of columns, or the real numbers, without some if named, as intervals."""
    if match := _MATRIX.fullmatch(text):
        rows = [_split(row, _CELL)[0] for row in _split(match[3], _ROW)[0] if row]
        cells = tuple(f"({match[1]})({cell})" if match[1] else cell for row in rows for cell in row)
        return Node("matrix", cells, (str(max(map(len, rows), default=0)),))
    if match := _REALS.fullmatch(text):
        bounds = filter(None, _split(match[1] or match[2] or "", _COMMA)[0])
        ends = [r"-\infty", *sorted(bounds, key=lambda bound: exact(bound) or 0), r"\infty"]
        return Node("list", tuple(f"({low}, {high})" for low, high in pairwise(ends)))
    return None


def _bracketed(text: str) -> Node | None:
    """Return the set, tuple or interval that a pair of brackets around the whole text makes; None without a pair."""
    spans = list(_BRACKET.finditer(text))
    if len(spans) < 2 or spans[0].start() or spans[0][0] not in _PAIRS or spans[-1].end() != len(text):
        return None
    left, right = spans[0][0], spans[-1][0]
    depths, depth = [], 0
    for span in spans[:-1]:
        depth += _step(span[0])
        depths.append(depth)
    if min(depths) < 1 or depth != 1 or (_PAIRS[left] != right and {left, right} - {*"()[]"}):
        return None
    inside = text[spans[0].end() : spans[-1].start()].strip()
    if left == "{":
        return _read(inside)
    parts = tuple(part for part in _split(inside, _COMMA)[0] if part)
    if left == r"\{":
        condition = _split(inside, re.compile(r"\\mid(?![A-Za-z])|\||:"))[0]
        if len(condition) == 2 and _NAME.fullmatch(condition[0].partition(r"\in")[0].strip()):
            return _read(condition[1])
        return Node("set", parts)
    if len(parts) == 1:
        return _read(inside) if _PAIRS[left] == right and left in "([" else None
    return Node("tuple", parts, (left, right) if left in "([" else ("(", ")"))


def _relation(text: str) -> Node:
    """Return the relation of a text; an inequality with a name between bounds is an interval."""
    parts, marks = _split(text, _RELATION)
    if _APPROXIMATE & {*marks}:  # of "12\pi \approx 37.7" the first part is the answer, unless it is a name
        index = next(i for i, mark in enumerate(marks) if mark in _APPROXIMATE)
        kept = parts[index + 1] if not parts[index] or _NAME.fullmatch(parts[index]) else parts[index]
        return _relation(" ".join([word for pair in zip(parts[:index], marks, strict=False) for word in pair] + [kept]))
    if not marks or (marks[0] == "=" and not parts[0]):
        return Node("value", (text,)) if not marks else _read(text[1:])
    if marks == (r"\in",) and _NAME.fullmatch(parts[0]):
        inner = _read(parts[1])
        return Node(inner.kind, inner.parts, inner.marks, parts[0])
    if {*marks} <= {*_FLIPPED}:
        parts, marks = parts[::-1], tuple(_FLIPPED[mark] for mark in marks[::-1])
    interval = _interval(parts, marks) if {*marks} <= {"<", r"\le"} else None
    return interval or Node("relation", parts, marks)


def _interval(parts: tuple[str, ...], marks: tuple[str, ...]) -> Node | None:
    """Return the interval of the only name in ascending inequalities; None without such a name."""
    brackets = "[" if marks[0] == r"\le" else "(", "]" if marks[-1] == r"\le" else ")"
    named = [bool(_NAME.fullmatch(part)) for part in parts]
    if len(parts) == 3 and named[1]:
        return Node("tuple", (parts[0], parts[2]), brackets, parts[1])
    if named == [True, False]:
        return Node("tuple", (r"-\infty", parts[1]), ("(", brackets[1]), parts[0])
    if named == [False, True]:
        return Node("tuple", (parts[0], r"\infty"), (brackets[0], ")"), parts[1])
    return None


def _same_nodes(gold: Node, answer: Node, depth: int) -> bool:
    kinds = gold.kind, answer.kind
    if gold.name and answer.name and not _same_name(gold.name, answer.name):
        return False
    if "relation" in kinds:
        return _same_relations(gold, answer, depth)
    if kinds == ("value", "value"):
        return _same_quantities(gold.parts[0], answer.parts[0])
    if gold.kind == answer.kind and gold.kind in ("matrix", "tuple"):
        return gold.marks == answer.marks and _in_order(gold.parts, answer.parts, depth)
    if {*kinds} == {"matrix", "tuple"}:  # a column vector
        return ("1",) in (gold.marks, answer.marks) and _in_order(gold.parts, answer.parts, depth)
    if {*kinds} == {"list", "tuple"} and len(gold.parts) == len(answer.parts):  # a point without its parentheses
        is_point = ("(", ")") in (gold.marks, answer.marks) and not gold.name + answer.name
        return is_point and _in_order(gold.parts, answer.parts, depth)
    return _in_any_order(_items(gold), _items(answer), depth)


def _in_order(ones: Sequence[str], others: Sequence[str], depth: int) -> bool:
    return len(ones) == len(others) and all(_same(a, b, depth) for a, b in zip(ones, others, strict=True))


def _in_any_order(ones: Sequence[str | Node], others: Sequence[str | Node], depth: int) -> bool:
    left = list(others)
    if len(ones) != len(left) or len(left) > _MAX_ITEMS:
        return False
    if len(left) == 1 and not (isinstance(ones[0], str) or isinstance(left[0], str)):
        return False
    for item in ones:
        index = next((i for i, other in enumerate(left) if _same_items(item, other, depth)), None)
        if index is None:
            return False
        del left[index]
    return True


def _same_items(one: str | Node, other: str | Node, depth: int) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return _same(one, other, depth)
    nodes = [_read(item) if isinstance(item, str) else item for item in (one, other)]
    return depth < _MAX_DEPTH and _same_nodes(nodes[0], nodes[1], depth + 1)


def _items(node: Node) -> list[str | Node]:
    """Return the items of a list or set, where each ± is two; any other node is its own item. The name in "x = 3, -2"
    is for all."""
    if node.kind not in ("list", "set", "value"):
        return [node]
    items: list[str] = []
    for part in node.parts:
        inner = _read(part)
        items += inner.parts if inner.kind == "list" and node.kind == "list" and inner.parts != node.parts else [part]
    name, sign, _ = items[0].partition("=") if items else ("", "", "")
    if sign and not any("=" in item for item in items[1:]):
        items = [items[0], *(f"{name}= {item}" for item in items[1:])]
    return [*items]


def _same_relations(gold: Node, answer: Node, depth: int) -> bool:
    """Compare an equation or inequality with another, or an equation "name = value" with the value."""
    if gold.kind == answer.kind:
        (first, *_, last), (other_first, *_, other_last) = gold.parts, answer.parts
        if {*gold.marks, *answer.marks} == {"="} and _same_name(first, other_first):
            return _same(last, other_last, depth)
        if gold.marks == answer.marks and _in_order(gold.parts, answer.parts, depth):
            return True
        one, other = (" ".join(w for p in zip(n.parts, (*n.marks, ""), strict=True) for w in p) for n in (gold, answer))
        return len(gold.parts) == len(answer.parts) == 2 and _same_leaves(one, other)
    relation, other_node = (gold, answer) if gold.kind == "relation" else (answer, gold)
    *names, value = relation.parts
    if {*relation.marks} - {"=", r"\equiv", r"\cong"} or not all(
        _NAME.fullmatch(_words(n)) or _same_leaves(n, value) for n in names
    ):
        return False
    if other_node.kind in ("list", "set") and len(other_node.parts) == 1:
        other_node = _read(other_node.parts[0])
    pair = (_read(value), other_node) if relation is gold else (other_node, _read(value))
    return depth < _MAX_DEPTH and _same_nodes(*pair, depth + 1)


def _same_name(one: str, other: str) -> bool:
    """Whether two left sides are the same; an index may be missing on one side: "x_1 = 2" and "x = 2"."""
    one, other = (re.sub(r"[\s{}]", "", name) for name in (one, other))
    return one == other or (one.partition("_")[0] == other.partition("_")[0] and ("_" in one) != ("_" in other))


def _same_quantities(gold: str, answer: str) -> bool:
    """Compare two expressions with units; a unit may be missing on one side."""
    one, other = quantity(gold), quantity(answer)
    pairs = [(one.value, other.value)] if not (one.unit and other.unit) or same_unit(one.unit, other.unit) else []
    if one.unit != other.unit:
        converted, units = zip(in_base_unit(*one), in_base_unit(*other), strict=True)
        pairs += [converted] if units[0] == units[1] else []
    return any(_same_leaves(*pair) for pair in pairs)


def _same_leaves(one: str, other: str) -> bool:
    """Compare two expressions, dates, times or ratios, or else two texts of words."""
    if _DATE.fullmatch(one) or _DATE.fullmatch(other) or (_TIME.fullmatch(one) and _TIME.fullmatch(other)):
        return one.lstrip("0") == other.lstrip("0")
    words = [re.sub(r"[\s.,;:!'\"(){}\\-]", "", _words(text)).casefold() for text in (one, other)]
    if any(_WORD.fullmatch(text.strip()) or _TEXT.search(text) for text in (one, other)):
        return words[0] == words[1] != ""
    ratios = one.split(":"), other.split(":")
    try:
        if min(map(len, ratios)) > 1:  # a : b : c up to a factor
            firsts = ratios[1][0], ratios[0][0]
            pairs = [(f"({a})*({firsts[0]})", f"({b})*({firsts[1]})") for a, b in zip(*ratios, strict=False)]
            return len(ratios[0]) == len(ratios[1]) and all(same_value(*pair) for pair in pairs)
        return max(map(len, ratios)) < 3 and same_value(one.replace(":", "/"), other.replace(":", "/"))
    except UnreadableError:
        return words[0] == words[1] != "" and len(words[0]) > 2


def _nesting(text: str) -> int:
    return max(accumulate(_step(match[0]) for match in _BRACKET.finditer(text)), default=0)


def _step(bracket: str) -> int:
    if bracket in _PAIRS or bracket == r"\begin{":
        return 1 if bracket != r"\begin{" else 2  # its own brace too
    return {r"\end{": 0}.get(bracket, -1 if bracket in _PAIRS.values() else 0)


def _split(text: str, separator: re.Pattern[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split a text at separators outside of brackets. Returns the stripped parts, and the separators between them."""
    if separator.search(text) is None:
        return (text.strip(),), ()
    steps = [(match.start(), _step(match[0])) for match in _BRACKET.finditer(text)]
    parts, marks, begin, depth, at = [], [], 0, 0, 0
    for match in separator.finditer(text):
        while at < len(steps) and steps[at][0] < match.start():
            depth += steps[at][1]
            at += 1
        if depth == 0:
            parts.append(text[begin : match.start()].strip())
            marks.append(match[0])
            begin = match.end()
    return (*parts, text[begin:].strip()), tuple(marks)
