"""Group-relative advantages from rewards (Shao et al. 2024, DeepSeekMath, eq. 3; unscaled form: Liu et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megagrpo.config import AlgorithmSection
from megagrpo.train_types import TrainSample
from megagrpo.types import Rollout, ScoredRollout

STD_EPSILON = 1e-4  # added to every standard deviation, as TRL and ms-swift do
REWARD_ROUNDING = (
    1e-12  # rewards that differ by less, relative to the largest or to 1, count as equal: 0.1 + 0.2 and 0.3
)
Scale = Literal["group", "batch", "none"]


def group_advantages(rewards: Tensor, scale: Scale, estimator: str = "grpo") -> Tensor:
    """Advantages [P, G] float64 of rewards [P, G], NaN where no function could score.

    `grpo`: each reward minus its group's mean. `rloo`: minus the mean of the group's others (Ahmadian et al. 2024,
    arXiv 2402.14740), which is G / (G - 1) times as much. Both are then divided as `scale` says: by the group's
    standard deviation, the batch's, or nothing. `reinforce_plus_plus`: minus the batch's mean, over the batch's
    standard deviation; `reinforce_plus_plus_baseline`: minus the group's mean, over the standard deviation of all such
    differences (Hu et al. 2025, arXiv 2501.03262).

    Standard deviations are unbiased and ignore NaN. Unscorable responses, groups of equal rewards (a batch of them for
    reinforce_plus_plus), groups with one scorable response, and rewards at the mean get exactly 0. Rewards are equal if
    they differ by rounding only. Raises ValueError for an infinite reward.
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be [prompts, generations], got shape {tuple(rewards.shape)}")
    if rewards.isinf().any():
        raise ValueError("rewards must be finite, or NaN where no function could score")
    rewards = rewards.double()
    if estimator == "reinforce_plus_plus":
        everything = rewards.flatten()[None]
        return group_advantages(everything, "group").view_as(rewards)
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    # The mean of floats is rounded in its last bit; without this a reward at the mean would get a gradient from
    # rounding, and its sample would not be skipped.
    largest = rewards.abs().nan_to_num(nan=0.0).amax(dim=1, keepdim=True).clamp(min=1)
    centred = torch.where(centred.abs() <= REWARD_ROUNDING * largest, 0.0, centred)
    spread = rewards
    if estimator == "rloo":
        scorable = (~rewards.isnan()).sum(dim=1, keepdim=True)
        centred = centred * scorable / (scorable - 1).clamp(min=1)
    elif estimator == "reinforce_plus_plus_baseline":
        scale, spread = "batch", centred
    if scale == "group":
        centred = centred / (nanstd(spread, dim=1, keepdim=True) + STD_EPSILON)
    elif scale == "batch":
        centred = centred / (nanstd(spread.flatten(), dim=0) + STD_EPSILON)
    return torch.where(_is_flat(rewards), 0.0, centred).nan_to_num(nan=0.0)


def normalized_sum_advantages(rewards: Tensor, weights: Tensor) -> Tensor:
    """Advantages [P, G] float64 of rewards [P, G, F] per function, NaN where one could not score; weights [F].

    GDPO (Liu et al. 2026, arXiv 2601.05242): each function is normalised within its group before the weighted sum, so
    that a function with large numbers does not drown the others; the sums are then normalised over the batch. Functions
    that score a group alike add 0.
    """
    each = torch.stack([group_advantages(of_function, "group") for of_function in rewards.unbind(-1)], dim=-1)
    summed = (each * weights.double()).sum(-1)
    summed = torch.where(rewards.isnan().all(-1), math.nan, summed)
    return group_advantages(summed.flatten()[None], "group").view_as(summed)


def advantages_of(
    rewards: Tensor, by_function: Tensor, algorithm: AlgorithmSection, weights: Sequence[float]
) -> Tensor:
    """The advantages [P, G] that `algorithm` asks for, of rewards [P, G] and of those by function [P, G, F], before
    their `weights` [F]."""
    if algorithm.multi_objective_aggregation == "sum_then_normalize":
        estimator = "grpo" if algorithm.own_estimator else algorithm.advantage_estimator
        return group_advantages(rewards, algorithm.scale_rewards, estimator)
    as_they_are = [1.0] * (by_function.shape[-1] - len(weights))  # rewards of turns and environments
    return normalized_sum_advantages(by_function, torch.tensor([*weights, *as_they_are]))


def flat_groups(rewards: Tensor) -> Tensor:
    """[P] bool: whether each group teaches nothing: its rewards [P, G] are all equal, or those [P, G, F] of every
    function; what no function could score is left out."""
    if rewards.dim() == 2:
        return _is_flat(rewards)[:, 0]
    return torch.stack([_is_flat(of_function) for of_function in rewards.unbind(-1)]).all(0)[:, 0]


def charged_kl(truncated: Tensor, kl: Tensor, mask_truncated: bool) -> Tensor:
    """The KL [P, G] that each reward pays, from the `kl` [P, G] of the loss tokens. With `mask_truncated` a response
    that was `truncated` [P, G] has no loss tokens: it pays the mean of its group's others, so that their advantages are
    those of rewards and KL among themselves. KL where a group has no response is 0, and `truncated` True."""
    if not mask_truncated:
        return kl
    counted = (kl * ~truncated).sum(1, keepdim=True) / (~truncated).sum(1, keepdim=True).clamp(min=1)
    return torch.where(truncated, counted, kl)


def less_kl(rewards: Tensor, kl: Tensor, beta: float) -> Tensor:
    """The rewards [P, G] less beta times the KL of each response [P, G]: the penalty of RLHF's PPO (Ziegler et al.
    2019, arXiv 1909.08593, eq. 2), whose KL is k1 summed over the response."""
    return rewards - beta * kl


def nanstd(values: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Unbiased standard deviation of `values` [...] along `dim`, ignoring NaN; NaN where fewer than two are left."""
    count = (~values.isnan()).sum(dim=dim, keepdim=keepdim)
    deviation = values - values.nanmean(dim=dim, keepdim=True)
    variance = deviation.square().nansum(dim=dim, keepdim=keepdim) / (count - 1).clamp(min=0)
    return torch.where(count > 1, variance, math.nan).sqrt()


def _is_flat(rewards: Tensor) -> Tensor:
    """[P, 1] bool: every scorable reward of the group is the same number, up to `REWARD_ROUNDING`."""
    known = ~rewards.isnan()
    low = torch.where(known, rewards, math.inf).amin(dim=1, keepdim=True)
    high = torch.where(known, rewards, -math.inf).amax(dim=1, keepdim=True)
    return high - low <= REWARD_ROUNDING * torch.maximum(low.abs(), high.abs()).clamp(min=1)


def reward_statistics(rewards: Tensor) -> dict[str, float]:
    """Metrics of rewards [P, G]: `reward`, `reward_std` (mean of the groups' stds), `reward_std_batch` (std of all
    rewards), `frac_reward_zero_std` (share of groups with equal rewards)."""
    group_std = nanstd(rewards, dim=1)
    flat = _is_flat(rewards)
    statistics = {
        "reward": rewards.nanmean().item(),
        "reward_std": group_std.nanmean().item(),
        "reward_std_batch": nanstd(rewards.flatten(), dim=0).item(),
        "frac_reward_zero_std": flat.double().mean().item(),
    }
    return {name: value for name, value in statistics.items() if not math.isnan(value)}


def to_samples(scored: Sequence[ScoredRollout], advantages: Tensor) -> list[TrainSample]:
    """One training sample per rollout, then one per branch; `advantages` [P, G] are in the order of the rollouts."""
    flat = advantages.flatten().tolist()
    samples = [_to_sample(s.rollout, s, flat[index], index) for index, s in enumerate(scored)]
    for trajectory, s in enumerate(scored):
        for branch in s.rollout.branches:
            samples.append(replace(_to_sample(branch, s, flat[trajectory], len(samples)), trajectory=trajectory))
    return samples


def _to_sample(rollout: Rollout, scored: ScoredRollout, advantage: float, index: int) -> TrainSample:
    prompt_ids = np.array(rollout.prompt.token_ids, np.int64)
    before = np.zeros(len(prompt_ids), np.float32)
    mask = torch.from_numpy(np.concatenate([before.astype(bool), rollout.written]))
    logprobs = torch.from_numpy(np.concatenate([before, rollout.rollout_logprobs]))
    token_ids = torch.from_numpy(np.concatenate([prompt_ids, rollout.response_ids]))
    prompt = rollout.prompt
    truncated, own = scored.rollout.finish_reason == "length", prompt.distribution
    return TrainSample(token_ids, mask, logprobs, advantage, index, truncated, prompt.inputs, own)
