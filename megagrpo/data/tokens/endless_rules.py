"""Finds rules of a grammar that never end, in xgrammar's serialized grammars."""

from __future__ import annotations

import collections
import json
import sys

# kinds of expressions in xgrammar's serialized grammars of this version
SERIALIZED, CLASS, RULE, SEQUENCE, CHOICES, REPEAT = "v16", 1, 4, 5, 6, 8


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
