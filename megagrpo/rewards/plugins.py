"""The registry in which files of `rewards.plugins` register reward functions by name, as in ms-swift."""

from __future__ import annotations

from collections.abc import Callable

orms: dict[str, Callable] = {}  # name -> function or class; `orms["name"] = Class` and `@register("name")` are the same


def register(name: str) -> Callable[[Callable], Callable]:
    """Decorator that registers a reward function or class under the name that `rewards.functions` uses."""

    def add(function: Callable) -> Callable:
        orms[name] = function
        return function

    return add
