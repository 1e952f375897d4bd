"""Problems of a configuration: what each one is about, what it says, and errors that carry several of them.

A reader compares `keys` and `rule`. No code reads the words of a problem.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem, or one note, about values of a configuration.

    `keys` are the dotted keys that it is about, first the one to change. `text` holds the value, the rule and the fix. `rule` is the number
    of a rule in docs/plan.md, None for a problem without one.
    """

    keys: tuple[str, ...]
    text: str
    rule: int | None = None

    def __post_init__(self) -> None:
        assert isinstance(self.keys, tuple) and self.keys, f"keys of {self.text!r} must be a tuple of dotted keys"

    def __str__(self) -> str:
        return f"{self.keys[0]}: {self.text}"

    def is_about(self, keys: Iterable[str]) -> bool:
        """Whether one of `keys` is a key of this problem, a section of one, or a part of one."""
        return any(_related(own, other) for own in self.keys for other in keys)


class ProblemError(ValueError):
    """A ValueError that carries its problems; the text has one line for each."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems

    def __reduce__(self) -> tuple:
        return type(self), self.problems


class ConfigError(ValueError):
    """A config that cannot be used. The text lists every problem, one a line; `problems` has those that are known with their keys."""

    def __init__(self, text: str, problems: Iterable[Problem] = ()) -> None:
        super().__init__(text)
        self.problems = tuple(problems)


def _related(one: str, other: str) -> bool:
    shorter, longer = sorted((one.split("."), other.split(".")), key=len)
    return longer[: len(shorter)] == shorter
