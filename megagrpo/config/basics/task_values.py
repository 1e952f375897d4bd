"""Values of a run's tasks before they are a config: merged mappings, weights by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def gives_parts(values: Mapping[str, Any]) -> bool:
    """Return whether a task's config has what `algorithm.advantage_by` compares; else its responses have one advantage
    each."""
    by, turns = values["algorithm"].get("advantage_by"), values.get("multi_turn") or {}
    functions = (values.get("rewards") or {}).get("functions") or ()
    per = [function.get("per") for function in functions if isinstance(function, Mapping)]
    if by in ("token", "process"):
        return "token" in per
    stepping = turns.get("scheduler") or turns.get("environment")
    return bool(stepping or "turn" in per if by == "turn" else stepping or turns.get("tools") or turns.get("agent"))


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `above` over `below`: mappings merge key by key, other values replace what they override."""
    both = dict(below)
    for key, value in above.items():
        nested = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = merged(both[key], value) if nested else value
    return both


def weights_by_step(weights: Sequence[float | Mapping[int, float]]) -> dict[int, list[float]]:
    """Return the weights of all tasks by the step from which they hold; the first step is 1.

    >>> weights_by_step([1.0, {1: 3.0, 50: 0.0}])
    {1: [1.0, 3.0], 50: [1.0, 0.0]}
    """
    given = [weight if isinstance(weight, Mapping) else {1: weight} for weight in weights]
    steps = sorted({1}.union(*given))
    return {step: [own[max((s for s in own if s <= step), default=1)] for own in given] for step in steps}
