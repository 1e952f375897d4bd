"""The registry in which files of `rewards.plugins` register reward functions by name, as in ms-swift."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# name -> function or class; `orms["name"] = Class` and `@register("name")` are the same
orms: dict[str, Callable[..., Any]] = {}


def register[F: Callable[..., Any]](name: str) -> Callable[[F], F]:
    """Decorator that registers a reward function or class under the name that `rewards.functions` uses."""

    def add(function: F) -> F:
        orms[name] = function
        return function

    return add
