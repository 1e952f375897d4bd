"""Defines problems of a configuration, and errors that carry several problems.

Code compares `keys`; no code reads a problem's text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem, or one note, about values of a configuration.

    `keys` are its dotted keys; the first one is the key to change. `text` states the value, the rule and the fix.
    """

    keys: tuple[str, ...]
    text: str

    def __post_init__(self) -> None:
        assert isinstance(self.keys, tuple) and self.keys, f"keys of {self.text!r} must be a tuple of dotted keys"

    def __str__(self) -> str:
        return f"{self.keys[0]}: {self.text}"

    def is_about(self, keys: Iterable[str]) -> bool:
        """Whether one of `keys` is a key of this problem, a section above such a key, or a key below it."""
        return any(_related(own, other) for own in self.keys for other in keys)


class ProblemError(ValueError):
    """A ValueError with one or more problems; its text has one line per problem."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


class ConfigError(ValueError):
    """The error of an unusable config. Its text has one line per problem; `problems` holds those with known keys."""

    def __init__(self, text: str, problems: Iterable[Problem] = ()) -> None:
        super().__init__(text)
        self.problems = tuple(problems)


def _related(one: str, other: str) -> bool:
    shorter, longer = sorted((one.split("."), other.split(".")), key=len)
    return longer[: len(shorter)] == shorter
