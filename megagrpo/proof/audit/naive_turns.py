"""Advantages of turns, turn by turn, as `algorithm.advantage_by` defines them, and of roles."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagrpo.algorithms.custom_advantage import Groups, checked, load_estimator
from megagrpo.algorithms.turn_advantages import Turns
from megagrpo.proof.audit.naive_advantages import ROUNDING, STD_EPSILON
from megagrpo.proof.audit.saved import Sample, Step

OfRows = Callable[[list[list[float | None]]], Sequence[float]]  # the advantages of rows of rewards


@dataclass(frozen=True)
class DumpedTurn:
    """A turn of the policy: its tokens [start, stop) of the sample with this index, and what it is compared by."""

    sample: int
    start: int
    stop: int
    reward: float | None
    number: int  # in the trajectory
    state: Hashable  # what the policy read since its turn before


def turns_of(step: Step) -> list[list[DumpedTurn]]:
    """Return the turns of each trajectory: those of its branches, then those of its first sample."""
    turns: list[list[DumpedTurn]] = []
    for of_trajectory in step.samples_in_order:
        turns.append([])
        of_functions = iter(_of_functions(step, step.samples[of_trajectory[-1]]))
        for index in of_trajectory:
            sample, before = step.samples[index], 0
            if sample.text["dialogue"] is None:
                next(of_functions, None)  # a sample without a dialogue is one turn, which has no advantage of its own
            for row in spans(sample):
                start, stop = (row[name] + sample.prompt_length for name in ("start", "stop"))
                state = before > 0, tuple(sample.token_ids[before:start].tolist())
                rewards = [row["reward"], *next(of_functions, ())]
                known = [reward for reward in rewards if reward is not None]
                reward = sum(known) if known else None
                turns[-1].append(DumpedTurn(index, start, stop, reward, len(turns[-1]), state))
                before = stop
    return turns


def _of_functions(step: Step, first: Sample) -> list[list[float | None]]:
    """Return for each turn of a trajectory its rewards by the functions with `per: turn`, with their weights."""
    rows, rewards = first.text.get("rewards_by_turn", {}), step.config.all_rewards
    weights = dict(zip(rewards.names, (function.weight for function in rewards.functions), strict=True))
    weighted = [[None if r is None else weights[name] * r for r in row] for name, row in rows.items()]
    return [list(of_turn) for of_turn in zip(*weighted, strict=True)]


def spans(sample: Sample) -> list[dict[str, Any]]:
    """Return the dumped turns of a sample, whose tokens are [start, stop) of its response."""
    dialogue = sample.text["dialogue"]
    rows: list[dict[str, Any]] = dialogue["turns"] if dialogue else []
    return rows


def turn_advantages(step: Step, advantages: Sequence[float]) -> list[list[float]]:
    """Return the advantage of each turn of each trajectory, which has one of `advantages`."""
    algorithm, turns = step.config.algorithm, turns_of(step)
    values: list[list[float]] = []
    for sample, of_trajectory in zip(step.trajectories, turns, strict=True):
        rewards = [math.nan if turn.reward is None else turn.reward for turn in of_trajectory]
        if algorithm.advantage_by == "state":
            known = [0.0 if math.isnan(reward) else reward for reward in rewards]
            rest = float(sample.text["reward"]) - sum(known)
            known[-1:] = [known[-1] + rest] if known else []
            rewards = [
                sum(algorithm.turn_discount**later * reward for later, reward in enumerate(known[i:]))
                for i in range(len(known))
            ]
        values.append(rewards)
    by_state, weight = algorithm.advantage_by == "state", algorithm.turn_advantage_weight
    keys = [
        [(step.group_of[t], turn.state if by_state else turn.number) for turn in row] for t, row in enumerate(turns)
    ]
    groups = defaultdict(list)
    for key, value in zip(chain(*keys), chain(*values), strict=True):
        groups[key].append(value)
    scaled = algorithm.scale_rewards == "group"
    return [
        [advantage + weight * _compared(value, groups[key], scaled) for key, value in zip(*row, strict=True)]
        for advantage, *row in zip(advantages, keys, values, strict=True)
    ]


def estimated(step: Step, table: Sequence[Sequence[float | None]], rewards: Sequence[float]) -> Tensor:
    """Return what the run's own `advantage_estimator` gives: [N], or one number for each turn. It has no second
    formula, so the audit runs the function again, on `rewards` [N] and the rewards by function of `table`."""
    algorithm, size = step.config.algorithm, max(map(len, step.groups))
    by_trajectory = turns_of(step)
    names = [*step.trajectories[0].text["rewards"]]
    rows = torch.tensor([[math.nan if value is None else value for value in row] for row in table]).double()
    lengths = [0] * len(rewards)
    for sample in step.samples:
        lengths[sample.trajectory] += sample.places.numel()
    truncated = [sample.text["finish_reason"] == "length" for sample in step.trajectories]
    turns = None
    if algorithm.advantage_by_turns:
        numbers: dict[Hashable, int] = {}
        every = [turn for of_trajectory in by_trajectory for turn in of_trajectory]
        turns = Turns(
            np.array([math.nan if turn.reward is None else turn.reward for turn in every]),
            np.repeat(np.arange(len(rewards)), [len(of_trajectory) for of_trajectory in by_trajectory]),
            np.array([numbers.setdefault(turn.state, len(numbers)) for turn in every], np.int64),
        )

    def grouped(values: Tensor, missing: float) -> Tensor:
        found = values.new_full((len(step.groups), size), missing)
        for row, group in zip(found, step.groups, strict=True):
            row[: len(group)] = values[group.start : group.stop]
        return found

    columns = {name: grouped(column, math.nan) for name, column in zip(names, rows.unbind(-1), strict=False)}
    of_lengths, of_ends = grouped(torch.tensor(lengths), 0), grouped(torch.tensor(truncated), 0)
    groups = Groups(grouped(torch.tensor(rewards).double(), math.nan), columns, of_lengths, of_ends, turns)
    found = checked(load_estimator(algorithm), groups, algorithm)
    if turns is not None:
        return found
    return torch.cat([row[: len(group)] for row, group in zip(found, step.groups, strict=True)])


def _compared(value: float, group: Sequence[float], scaled: bool) -> float:
    """Return the value minus the group's mean, over its unbiased standard deviation if `scaled`; 0 for NaN."""
    known = [other for other in group if not math.isnan(other)]
    if math.isnan(value) or len(known) < 2:
        return 0.0
    difference = value - statistics.fmean(known)
    if abs(difference) <= ROUNDING * max(1.0, *map(abs, known)):
        return 0.0
    return difference / (statistics.stdev(known) + STD_EPSILON) if scaled else difference


def role_advantages(step: Step, table: list[list[float | None]], of_rows: OfRows) -> list[float]:
    """Return the advantage of each sample, that of its role. `table` has the rewards of each trajectory by function and
    role; `of_rows` returns the advantages of such rows. A row of None is a trajectory without a turn of the role."""
    rewards = [sample.text["dialogue"]["rewards"] if sample.text["dialogue"] else {} for sample in step.trajectories]
    names = [*step.config.all_rewards.names, *dict.fromkeys(name for own in rewards for name in own)]
    found = [0.0] * len(step.samples)
    for task, role in dict.fromkeys((sample.text.get("task", ""), sample.role) for sample in step.samples):
        mine = [
            i for i, sample in enumerate(step.samples) if (sample.text.get("task", ""), sample.role) == (task, role)
        ]
        roles, spoke = step.roles_of(step.samples[mine[0]]), {step.samples[i].trajectory for i in mine}
        rows = [
            [
                None if trajectory not in spoke or (name in roles and name != role) else cell
                for name, cell in zip(names, row, strict=True)
            ]
            for trajectory, row in enumerate(table)
        ]
        values = of_rows(rows)
        for i in mine:
            found[i] = roles.get(role, 1.0) * values[step.samples[i].trajectory]
    return found


def spread(step: Step, advantages: Sequence[float], of_turns: Sequence[Sequence[float]] | None) -> list[Tensor]:
    """Return the advantage [L] float64 of each token of each sample: the trajectory's, or that of its turn."""
    rows = [torch.full((s.length,), advantages[s.trajectory], dtype=torch.float64) for s in step.samples]
    for turns, values in zip(turns_of(step), of_turns or (), strict=False):
        for turn, value in zip(turns, values, strict=True):
            rows[turn.sample][turn.start : turn.stop] = value
    return rows
