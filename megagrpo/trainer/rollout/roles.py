"""The roles of an agent: each has rewards, advantages and metrics of its own, and a weight in the loss.

The reward of a role in a trajectory is what the agent returned for it, plus the weighted sum of the functions. It
is compared with the rewards of the same role in the other trajectories of the group, as `algorithm` says. The advantage
of its samples is that times the role's weight. Samples of a role with weight 0 are not in the loss or its denominators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megagrpo.algorithms.advantages import flat_groups, reward_statistics
from megagrpo.data.packing.step_samples import StepSamples

Advantages = Callable[[StepSamples, Tensor, Tensor], Tensor]  # [P, G] of rewards [P, G] and by function [P, G, F]


@dataclass(frozen=True)
class Role:
    """A role of a task in a step of P groups of G trajectories. The name "" stands for samples without a role."""

    name: str
    task: str
    weight: float
    samples: np.ndarray  # [N + M] bool: the samples of the role
    rewards: Tensor  # [P, G] float64; NaN where it took no turn or has no reward
    by_function: Tensor  # [P, G, F] float64, before weights

    def spoke(self, samples: StepSamples) -> np.ndarray:
        """[N] bool: whether the role took a turn in each trajectory of the step."""
        return np.bincount(samples.trajectories[self.samples], minlength=len(samples)) > 0


def roles_of(
    samples: StepSamples, group: int, weight_of: Mapping[str, float], listed: Mapping[str, Mapping[str, float]]
) -> list[Role]:
    """Return the roles of each task that samples of the step have; none in a step without roles. `weight_of` has the
    weights of reward functions, `listed` the roles of each task with their weights; a run without tasks has one, "".
    """
    if not samples.columns.roles:
        return []
    columns, every = samples.columns, samples.every
    trajectories, by_function = samples.trajectories, samples.rewards_by_function(group)
    weights = torch.tensor([weight_of.get(name, 1.0) for name in columns.rewards]).double()
    found, tasks = list[Role](), np.array([prompt.task for prompt in samples.prompts])
    for task, own_roles in listed.items():
        in_task = (tasks == task)[trajectories]
        for index, name in enumerate(("", *columns.roles), -1):
            mine = in_task & (every.facts["role"] == index)
            if not mine.any():
                continue
            spoke = samples.by_group(np.bincount(trajectories[mine], minlength=len(samples)) > 0, group, missing=False)
            others = [o in own_roles and o != name for o in (c.removeprefix(f"{task}/") for c in columns.rewards)]
            own = by_function.masked_fill(torch.tensor(others) | ~spoke[..., None], torch.nan)
            rewards = torch.where(own.isnan().all(-1), torch.nan, (own.nan_to_num(nan=0.0) * weights).sum(-1))
            found.append(Role(name, task, own_roles.get(name, 1.0), mine, rewards, own))
    return found


def role_advantages(samples: StepSamples, roles: Sequence[Role], group: int, advantages: Advantages) -> np.ndarray:
    """Return the advantage [N + M] float64 of each sample: that of its role in its trajectory, times its weight."""
    inside = samples.in_groups(group)
    found, trajectories = np.zeros(len(samples.every)), samples.trajectories
    for role in roles:
        table = advantages(samples, role.rewards, role.by_function)[inside].numpy()
        found[role.samples] = role.weight * table[trajectories[role.samples]]
    return found


def trained_members(samples: StepSamples, roles: Sequence[Role], trajectories: np.ndarray) -> np.ndarray:
    """Return the samples of these trajectories as `StepSamples.members` does, without roles of weight 0."""
    members = samples.members(trajectories)
    frozen = np.zeros(len(samples.every), bool)
    for role in roles:
        frozen |= role.samples & (role.weight == 0)
    return members[~frozen[members]]


def role_metrics(samples: StepSamples, roles: Sequence[Role], group: int) -> dict[str, float]:
    """Return the metrics of each role in a step of groups of `group` trajectories; and the share of groups in which no
    reward differs, because the sum of a game's rewards may be constant."""
    if not roles:
        return {}
    groups, lengths = samples.groups(group), samples.every.written
    flat = flat_groups(samples.rewards_by_function(group))
    metrics = {"frac_reward_zero_std": flat.double().mean().item()}
    for role in roles:
        begin = f"tasks/{role.task}/" if role.task else ""
        if begin:
            own = samples.groups_of_tasks(group)[role.task]
            metrics[f"{begin}frac_reward_zero_std"] = flat[own].double().mean().item()
        if not role.name:
            continue
        speaks = np.bincount(groups, role.spoke(samples), len(flat))
        found = reward_statistics(role.rewards[torch.from_numpy(speaks > 0)]) | {
            "groups": float((speaks > 0).sum()),
            "single_groups": float((speaks == 1).sum()),
            "samples": float(role.samples.sum()),
            "mean_length": float(lengths[role.samples].sum() / speaks.sum()),
        }
        metrics |= {f"{begin}roles/{role.name}/{key}": value for key, value in found.items()}
    return metrics
