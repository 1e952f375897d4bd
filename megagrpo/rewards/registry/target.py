"""Defines what a worker loads: the names of built-in rewards, and the location of a function or class.

Imports only the standard library: every worker process reads this file, and pydantic would take most of its start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    pass

BUILT_IN_REWARDS = {
    "exact_number": "megagrpo.rewards.functions.text_rewards:exact_number",
    "accuracy": "megagrpo.rewards.functions.math_accuracy:accuracy",
    "reasoning_accuracy": "megagrpo.rewards.functions.math_accuracy:reasoning_accuracy",
    "cosine": "megagrpo.rewards.functions.math_accuracy:Cosine",
    "format": "megagrpo.rewards.functions.text_rewards:format",
    "think_format": "megagrpo.rewards.functions.text_rewards:think_format",
    "react_format": "megagrpo.rewards.functions.text_rewards:react_format",
    "repetition": "megagrpo.rewards.functions.text_rewards:repetition",
    "token_repetition": "megagrpo.rewards.functions.text_rewards:token_repetition",
    "soft_overlong": "megagrpo.rewards.functions.text_rewards:soft_overlong",
    "reasoning_gym": "megagrpo.rewards.functions.gym_score:reasoning_gym",
    "code_execution": "megagrpo.rewards.functions.code_execution:CodeExecution",
    "rubric": "megagrpo.rewards.functions.judged:Rubric",
    "pairwise": "megagrpo.rewards.functions.judged:Pairwise",
}
JUDGES = frozenset({"rubric", "pairwise"})
WHOLE_GROUP = frozenset({"pairwise"})  # they compare the completions of a group
REPEATABLE = frozenset(BUILT_IN_REWARDS) - {"code_execution"} - JUDGES  # deterministic functions


@dataclass(frozen=True)
class Target:
    """The location of a function or class. `location` is a dotted module or the absolute path of a .py file;
    `attribute` is the name in it.

    `preset` are options that the config's name contains. A `heavy` target gets a worker of its own, so that no other
    worker loads it too. An `independent` one scores each completion on its own.
    """

    location: str
    attribute: str
    preset: tuple[tuple[str, Any], ...] = ()
    heavy: bool = False
    independent: bool = False


class Signature(TypedDict):
    """What a worker reports of a loaded function. `options` are the names of its args (of a class: its constructor)."""

    options: tuple[str, ...]
    unknown: tuple[str, ...]  # options of the config that it does not take
    accepts: tuple[str, ...]  # names of what a call takes
    open: bool  # a call takes any name
    needs: tuple[tuple[str, ...], ...]  # required columns, each as a tuple of alternatives
    is_coroutine: bool
    independent: bool
    completions_per_call: int | None
    value_of_failure: float | None  # score of a completion whose scoring failed
    finds_row_faults: bool  # it has `row_fault`
