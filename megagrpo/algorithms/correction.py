"""Weights that correct for the engine having sampled from slightly other probabilities than the trainer computes.

The ratio is trainer / engine for the same weights: exp(old - rollout). Per token; per sequence as the product over its
tokens (TRL); or per sequence as their geometric mean (ms-swift). What is outside the allowed band is cut to it
(`truncate`), weighs nothing (`mask`), or takes its whole sequence along (`reject`). Weights carry no gradient and
multiply the policy term, never the KL.

Sources: truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training";
masked, Liu et al. 2025, "When speed kills stability"; two-sided band on tokens (IcePop), Ring-1T, 2025, arXiv
2510.18855.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megagrpo.algorithms.policy_losses import LOG_RATIO_LIMIT
from megagrpo.algorithms.sequences import Sequences, masked_sum
from megagrpo.train_types import Metric


def correction_weights(
    old_logprobs: Tensor,  # [T]
    rollout_logprobs: Tensor,  # [T]
    sequences: Sequences,
    mode: str,  # "token_truncate", "geometric_mask", ...: level and action
    low: float | None,
    high: float | None,
) -> tuple[Tensor, Tensor]:
    """(weights [T], ratios [T]) without gradient; the second is what the band was held against.

    Levels: token, sequence, geometric. Actions: truncate, mask, reject (a token outside the band removes its sequence).
    A bound that is None does not bind. A log-prob that the engine did not give (NaN) counts as equal to the trainer's.
    """
    level, action = mode.split("_")
    difference = (old_logprobs - rollout_logprobs).detach().nan_to_num(nan=0.0)
    difference = torch.where(sequences.mask, difference, 0.0)
    if level == "sequence":
        difference = sequences.spread(sequences.sums(difference))
    elif level == "geometric":
        difference = sequences.spread(sequences.means(difference))
    ratio = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    below, above = (0.0 if low is None else low), (math.inf if high is None else high)
    if action == "truncate":
        return ratio.clamp(below, above), ratio
    outside = (ratio < below) | (ratio > above)
    if action == "reject":
        return torch.where(sequences.spread(sequences.sums(outside.float())) > 0, 0.0, 1.0).to(ratio.dtype), ratio
    return torch.where(outside, 0.0, ratio), ratio


def correction_metrics(weights: Tensor, sequences: Sequences, mode: str) -> dict[str, Metric]:
    """TRL's names: `sampling/importance_sampling_ratio/min`, `mean` and `max`, of the `weights` [T] after truncation
    and masking; over loss tokens, or over sequences for a `mode` with one weight per sequence."""
    mask, name = sequences.mask, "sampling/importance_sampling_ratio"
    total, count = masked_sum(weights, mask) if mode.startswith("token") else sequences.total_of_means(weights)
    return {
        f"{name}/mean": Metric(total, count),
        f"{name}/min": Metric(torch.where(mask, weights, math.inf).min(), count, "min"),
        f"{name}/max": Metric(torch.where(mask, weights, 0.0).max(), count, "max"),
    }
