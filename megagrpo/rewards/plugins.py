"""Where the files of `rewards.plugins` register reward functions under names of their own, as in ms-swift."""

from __future__ import annotations

from collections.abc import Callable

orms: dict[str, Callable] = {}  # name -> function or class; `orms["name"] = Class` and `@register("name")` are the same


def register(name: str) -> Callable[[Callable], Callable]:
    """Decorator that gives a reward function or class the name by which `rewards.functions` calls it."""

    def add(function: Callable) -> Callable:
        orms[name] = function
        return function

    return add
