"""Finds the keywords of a JSON schema that a grammar of xgrammar does not enforce, and rules that never end.

xgrammar reads the first keyword of `HEADS` that a schema has, and no other; else the keywords of its type. Without a
type it infers object or array from `INFERRED`, and takes anything else for any JSON value.
"""

from __future__ import annotations

import collections
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
NEVER_READ = ("not", "if", "$dynamicRef", "$recursiveRef")
READ = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("unevaluatedProperties", "minProperties", "maxProperties"),
    ),
}
UNREAD = {
    "number": ("multipleOf",),
    "array": ("uniqueItems", "contains", "minContains", "maxContains"),
    "object": ("dependentRequired", "dependentSchemas", "dependencies"),
}
INFERRED = {
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}
WITHOUT_EFFECT = {"uniqueItems": False, "minItems": 0, "minLength": 0, "minProperties": 0, "required": []}
TYPES: dict[str, tuple[type, ...]] = {
    **{"string": (str,), "boolean": (bool,), "null": (type(None),), "array": (list,), "object": (dict,)},
    **{"integer": (int,), "number": (int, float)},
}
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
OF_ONE = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames")

REMOVE = "remove it, and let a reward function test it"
BRANCHES = "write it into the schema that {} names"
# a quote, a backslash or a control character in a regular expression, outside of [^...]
_BREAKS_TEXT = re.compile(r"\"|\\\\|\\[nrtfv0]|\\x[01]|\\u00[01]|\\x22|\\u0022|\\x5c|\\u005c", re.IGNORECASE)
_EXCLUDED = re.compile(r"\[\^(?:\\.|[^\]\\])*\]")
# kinds of expressions in xgrammar's serialized grammars of this version
SERIALIZED, CLASS, RULE, SEQUENCE, CHOICES, REPEAT = "v16", 1, 4, 5, 6, 8


def unread(schema: Mapping[str, Any]) -> str | None:
    """Return where a schema has a keyword that xgrammar does not enforce, why, and the fix; None without any."""
    for pointer, part in subschemas(schema):
        for keyword, reason in _unread_here(part):
            return f"`{keyword}` at {pointer}: {reason}"
    return None


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the JSON pointers and mappings of a schema and the schemas inside it."""
    left: list[tuple[str, Any]] = [("#", schema)]
    while left:
        pointer, part = left.pop()
        if not isinstance(part, Mapping):
            continue
        yield pointer, part
        for name in OF_NAMES:
            inside = part.get(name)
            if isinstance(inside, Mapping):
                left += [(f"{pointer}/{name}/{key}", value) for key, value in inside.items()]
        for name in OF_SCHEMAS:
            if isinstance(part.get(name), list):
                left += [(f"{pointer}/{name}/{i}", value) for i, value in enumerate(part[name])]
        for name in OF_ONE:
            value = part.get(name)
            if name == "propertyNames" and isinstance(value, Mapping) and not {*HEADS} & {*value}:
                value = {"type": "string", **value}
            left.append((f"{pointer}/{name}", value))


def _unread_here(part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keywords of one schema that are not enforced, with the fix."""
    present = [name for name, value in part.items() if name not in WITHOUT_EFFECT or value != WITHOUT_EFFECT[name]]
    ref = part.get("$ref")
    if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
        yield "$ref", f"{ref!r:.80} is not below `#/`; copy the definition into $defs of this schema"
    if isinstance(part.get("allOf"), list) and len(part["allOf"]) != 1:
        yield "allOf", "xgrammar reads an allOf of one schema only; merge its schemas into one"
    for name in NEVER_READ:
        if name in present and (name != "if" or {"then", "else"} & {*present}):
            yield name, f"xgrammar ignores it; {REMOVE}"
    head = next((name for name in HEADS if name in part), None)
    yield from _beside(part, present, head) if head else _of_its_types(part, present)


def _beside(part: Mapping[str, Any], present: list[str], head: str) -> Iterator[tuple[str, str]]:
    """Yield the keywords beside the keyword that xgrammar reads alone."""
    others = {*HEADS, "type"}.union(*READ.values(), *UNREAD.values()) - {head}
    if head in ("const", "enum") and "type" in part and _all_have_type(part, head):
        others.remove("type")
    for name in filter(others.__contains__, present):
        yield name, f"xgrammar reads only `{head}` of this schema; {BRANCHES.format(head)}, or remove it"


def _of_its_types(part: Mapping[str, Any], present: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the keywords of a schema's types that xgrammar does not read."""
    types = _types(part)
    read = set[str]().union(*(READ.get(kind, ()) for kind in types))
    known = set[str]().union(*(table.get(kind, ()) for table in (READ, UNREAD) for kind in types or table))
    for name in present:
        if name in known - read:
            fix = REMOVE if types else "add `type`, such as string or object"
            yield name, f"xgrammar ignores it{'' if types else ' without `type`'}; {fix}"
    yield from _pairs(part, types)


def _pairs(part: Mapping[str, Any], types: list[str]) -> Iterator[tuple[str, str]]:
    """Yield keywords that xgrammar reads, but not with these values or beside others."""
    if not types and part.get("type") == []:
        yield "type", "names no type; name one"
    names = part.get("properties")
    missing = [name for name in part.get("required") or () if not isinstance(names, Mapping) or name not in names]
    if "object" in types and missing:
        yield "required", f"xgrammar ignores {missing[0]!r}, which `properties` lacks; add it there"
    if "string" in types and "pattern" in part:
        if "format" in part:
            yield "pattern", "xgrammar reads only `format` of the two; remove one"
        if _BREAKS_TEXT.search(_EXCLUDED.sub("", str(part["pattern"]))):
            reason = "xgrammar writes quotes, backslashes and control characters without JSON's escapes"
            yield "pattern", f"{reason}; leave them out of the pattern"


def _types(part: Mapping[str, Any]) -> list[str]:
    """Return the types that xgrammar reads a schema as; [] for any value. An integer is a number here."""
    given = part.get("type")
    types = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    if not types:
        types = [kind for kind, names in INFERRED.items() if any(name in part for name in names)][:1]
    return ["number" if kind == "integer" else str(kind) for kind in types]


def _all_have_type(part: Mapping[str, Any], head: str) -> bool:
    """Whether the values of `const` or `enum` all have the schema's type, which then has no effect."""
    given, values = part["type"], part["enum"] if head == "enum" else [part["const"]]
    types = given if isinstance(given, list) else [given]
    return isinstance(values, list) and all(any(_has_type(value, kind) for kind in types) for value in values)


def _has_type(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES.get(kind, ()))


def overlapping(schema: Mapping[str, Any]) -> str | None:
    """Return the JSON pointer of a `oneOf` whose branches no `discriminator` tells apart; None without one."""
    return next(
        (pointer for pointer, part in subschemas(schema) if "oneOf" in part and "discriminator" not in part), None
    )


def endless_rule(serialized: str) -> str | None:
    """Return the name of a rule that a response can enter and never end, of a grammar that xgrammar serialized. None
    without one, and for another version of the format."""
    grammar = json.loads(serialized)
    if grammar.get("__VERSION__") != SERIALIZED:
        return None
    data, starts, rules = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"], grammar["rules"]
    expressions = [(data[i], data[i + 2 : i + 2 + data[i + 1]]) for i in starts if i < len(data)]
    ends = _ending(expressions, [rule[1] for rule in rules])
    reached, left = set(), [grammar["root_rule_id"]]
    while left:
        if (rule := left.pop()) in reached:
            continue
        reached.add(rule)
        if not ends[rules[rule][1]]:
            return str(rules[rule][0])
        left += _rules_in(rules[rule][1], expressions)
    return None


def _ending(expressions: list[tuple[int, list[int]]], bodies: list[int]) -> list[bool]:
    """Return for each expression whether a text of it ends. `bodies` are the expressions of rules. Linear in time."""
    waits, users = [0] * len(expressions), collections.defaultdict(list)
    for i, (kind, inside) in enumerate(expressions):
        needed = inside if kind in (SEQUENCE, CHOICES) else []
        if kind == RULE or (kind == REPEAT and inside[1] > 0):
            needed = [bodies[inside[0]]]
        empty = kind == CLASS and inside[0] == 1 and _is_everything(inside[1:])
        waits[i] = 1 if kind == CHOICES or empty else len(needed)
        for j in needed:
            users[j].append(i)
    ready = [i for i, count in enumerate(waits) if count == 0]
    ends = [count == 0 for count in waits]
    while ready:
        for user in users[ready.pop()]:
            waits[user] -= 1
            if waits[user] == 0:
                ends[user] = True
                ready.append(user)
    return ends


def _is_everything(bounds: list[int]) -> bool:
    """Whether ranges of characters, first and last in turn, have every character."""
    first = 0
    for low, high in sorted(zip(bounds[::2], bounds[1::2], strict=True)):
        if low > first:
            return False
        first = max(first, high + 1)
    return first > sys.maxunicode


def _rules_in(body: int, expressions: list[tuple[int, list[int]]]) -> list[int]:
    """Return the rules that the expression `body` names."""
    found, left = [], [body]
    while left:
        kind, inside = expressions[left.pop()]
        if kind in (RULE, REPEAT):
            found.append(inside[0])
        elif kind in (SEQUENCE, CHOICES):
            left += inside
    return found
