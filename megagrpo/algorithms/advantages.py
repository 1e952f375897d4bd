"""Group-relative advantages from rewards (Shao et al. 2024, DeepSeekMath, eq. 3; Liu et al. 2025 for the unscaled form)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from megagrpo.types import ScoredRollout, TrainSample

STD_EPSILON = 1e-4  # added to every standard deviation, as TRL and ms-swift do
Scale = Literal["group", "batch", "none"]


def group_advantages(rewards: Tensor, scale: Scale) -> Tensor:
    """Advantages [P, G] float64 of rewards [P, G], NaN where no function could score.

    Each reward is centred on its group's mean, then divided by the group's standard deviation, the whole batch's, or nothing.
    Standard deviations are unbiased and ignore NaN. Unscorable responses, groups of equal rewards and groups with one scorable response
    get exactly 0.
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be [prompts, generations], got shape {tuple(rewards.shape)}")
    rewards = rewards.double()
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    std = nanstd(rewards, dim=1, keepdim=True)
    # The mean of equal floats may differ from them in the last bit; without this a dead group would get a gradient from rounding.
    flat = _is_flat(rewards)
    if scale == "group":
        centred = centred / (std + STD_EPSILON)
    elif scale == "batch":
        centred = centred / (nanstd(rewards.flatten(), dim=0) + STD_EPSILON)
    return torch.where(flat, 0.0, centred).nan_to_num(nan=0.0)


def nanstd(values: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Unbiased standard deviation along `dim`, NaN entries left out; NaN where fewer than two are left."""
    count = (~values.isnan()).sum(dim=dim, keepdim=keepdim)
    deviation = values - values.nanmean(dim=dim, keepdim=True)
    variance = deviation.square().nansum(dim=dim, keepdim=keepdim) / (count - 1).clamp(min=0)
    return torch.where(count > 1, variance, math.nan).sqrt()


def _is_flat(rewards: Tensor) -> Tensor:
    """[P, 1] bool: every scorable reward of the group is the same number."""
    known = ~rewards.isnan()
    low = torch.where(known, rewards, math.inf).amin(dim=1, keepdim=True)
    high = torch.where(known, rewards, -math.inf).amax(dim=1, keepdim=True)
    return low >= high


def rewards_by_group(scored: Sequence[ScoredRollout], num_generations: int) -> Tensor:
    """Rewards [P, G] float64 of rollouts in prompt order, each group's responses next to each other."""
    if len(scored) % num_generations:
        raise ValueError(f"{len(scored)} rollouts are not whole groups of {num_generations}")
    return torch.tensor([s.reward for s in scored], dtype=torch.float64).view(-1, num_generations)


def reward_statistics(rewards: Tensor) -> dict[str, float]:
    """`reward`, `reward_std` (mean of the groups' stds), `reward_std_batch` (std of all rewards), `frac_reward_zero_std` (share of groups
    that teach nothing)."""
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
    """One training sample per rollout; `advantages` [P, G] in the same order."""
    flat = advantages.flatten().tolist()
    return [_to_sample(s, advantage, index) for index, (s, advantage) in enumerate(zip(scored, flat, strict=True))]


def _to_sample(scored: ScoredRollout, advantage: float, index: int) -> TrainSample:
    rollout = scored.rollout
    prompt_length, response_length = len(rollout.prompt.token_ids), len(rollout.response_ids)
    mask = torch.zeros(prompt_length + response_length, dtype=torch.bool)
    mask[prompt_length:] = True
    logprobs = torch.zeros(prompt_length + response_length)
    logprobs[prompt_length:] = torch.tensor(rollout.rollout_logprobs)
    token_ids = torch.tensor(rollout.prompt.token_ids + rollout.response_ids, dtype=torch.int64)
    return TrainSample(token_ids=token_ids, response_mask=mask, rollout_logprobs=logprobs, advantage=advantage, index=index)
