"""Advantages of users: `algorithm.advantage_estimator: path/file.py:name`, imported and tried on two groups before a
run."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megagrpo.algorithms.turn_advantages import Turns
from megagrpo.config import AlgorithmSection, Problem, ProblemError
from megagrpo.platform.process import user_code

KEY = "algorithm.advantage_estimator"


@dataclass(frozen=True)
class Groups:
    """What a function of the user's own knows of a step: P groups of up to G trajectories, and their K turns. Rows of
    smaller groups end with NaN, 0 and False."""

    rewards: Tensor  # [P, G] float64, without the rewards of tokens with `advantage_by` token or process; NaN: none
    by_function: dict[str, Tensor]  # [P, G] float64 by reward function, before weights; NaN where it could not score
    lengths: Tensor  # [P, G] int64, tokens that the policy wrote
    truncated: Tensor  # [P, G] bool: the response reached its length limit
    turns: Turns | None  # with `advantage_by` turn or state, else None


Estimator = Callable[[Groups, AlgorithmSection], Tensor]


def load_estimator(algorithm: AlgorithmSection) -> Estimator:
    """Return the function of `algorithm.advantage_estimator`, with checks of its results. Raises ProblemError when its
    import or its trial on two groups fails."""
    name = algorithm.advantage_estimator
    estimator = imported(name)
    try:
        inspect.signature(estimator).bind(_few_groups(algorithm), algorithm)
        checked(estimator, _few_groups(algorithm), algorithm)
    except TypeError as error:
        raise _problem(name, f"cannot be called as an estimator: {error}; {_signature(algorithm)}") from error
    except ValueError as error:
        raise ProblemError(Problem((KEY,), str(error).removeprefix(f"{KEY}: "))) from error
    return estimator


def checked(estimator: Estimator, groups: Groups, algorithm: AlgorithmSection) -> Tensor:
    """Return the advantages float64 that the function gives: [P, G], with turns [K]. Raises ValueError that names the
    key, the function and the fault."""
    name, shape = algorithm.advantage_estimator, groups.rewards.shape
    if groups.turns is not None:
        shape = torch.Size([groups.turns.rewards.size])
    try:
        result: object = estimator(groups, algorithm)  # of the user's function, whatever its types say
    except Exception as error:
        raise _fault(name, f"raised {user_code.described(error)}; {_signature(algorithm)}") from error
    if not isinstance(result, Tensor):
        raise _fault(name, f"returned {type(result).__name__}, not a tensor; {_signature(algorithm)}")
    if result.shape != shape or not result.is_floating_point():
        wanted = f"floating-point {list(shape)}"
        raise _fault(name, f"returned {result.dtype} {list(result.shape)}, not {wanted}; {_signature(algorithm)}")
    if not result.isfinite().all():
        reason = "returned NaN or infinity; return 0 where groups.rewards is NaN or all rewards of a group are equal"
        raise _fault(name, reason)
    return result.detach().double()


@functools.cache
def imported(name: str) -> Estimator:
    """Return the function that the user names, which has had its trial. Raises ProblemError."""
    try:
        return user_code.load_named(name)
    except ValueError as error:
        raise _problem(name, str(error)) from error


def _fault(name: str, reason: str) -> ValueError:
    return ValueError(f"{KEY}: `{name}` {reason}")


def _problem(name: str, reason: str) -> ProblemError:
    return ProblemError(Problem((KEY,), f"`{name}` {reason}"))


def _signature(algorithm: AlgorithmSection) -> str:
    shape = "[K], one per turn" if algorithm.advantage_by_turns else "[P, G]"
    return f"an estimator takes (groups, algorithm) and returns advantages {shape} (docs/credit.md)"


def _few_groups(algorithm: AlgorithmSection) -> Groups:
    """Two groups of three trajectories with two turns each: one without a reward in the first, equal rewards in the
    second."""
    rewards = torch.tensor([[1.0, 0.0, torch.nan], [0.5, 0.5, 0.5]], dtype=torch.float64)
    turns = None
    if algorithm.advantage_by_turns:
        of_turns = np.array([1.0, np.nan, 0.0, 0.5, 0.25, np.nan, np.nan, np.nan, 0.0, 1.0, 1.0, 1.0])
        turns = Turns(of_turns, np.repeat(np.arange(6), 2), np.tile(np.arange(2), 6))
    lengths = torch.tensor([[8, 4, 2], [16, 1, 3]])
    by_function: dict[str, Tensor] = defaultdict(rewards.clone)  # whatever the names of the run's functions are
    return Groups(rewards, by_function, lengths, lengths > 8, turns)
