"""How far the engine's log-probs of the sampled tokens are from the trainer's for the same weights.

The first four's names and formulas are NeMo-RL's (`nemo_rl/algorithms/loss`, `ClippedPGLossFn`): d = old - rollout per
token, m = log((exp(old) + exp(rollout)) / 2), k3(x) = exp(x) - x - 1 (Schulman 2020). The last two are TRL's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megagrpo.train_types import Metric


def mismatch_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> dict[str, Metric]:
    """Sums and counts over one micro-batch's loss tokens, all [T]; exact when added up over micro-batches and ranks.

    `token_mult_prob_error`: mean of exp|d|, 1 when the two agree. `gen_kl_error`: k3(d), which estimates KL(engine ||
    trainer) on tokens that the engine sampled. `policy_kl_error`: k3(-d), the other direction. `js_divergence_error`:
    the mean of k3(old - m) and k3(rollout - m). `sampling/sampling_logp_difference/mean` and `/max`: |d| in nats.
    """
    old, rollout = old_logprobs.detach(), rollout_logprobs
    difference = old - rollout
    mixture = torch.logaddexp(old, rollout) - math.log(2)
    per_token = {
        "token_mult_prob_error": difference.abs().exp(),
        "gen_kl_error": _k3(difference),
        "policy_kl_error": _k3(-difference),
        "js_divergence_error": (_k3(old - mixture) + _k3(rollout - mixture)) / 2,
        "sampling/sampling_logp_difference/mean": difference.abs(),
    }
    count = loss_mask.sum().float()
    sums = {name: Metric(torch.where(loss_mask, values, 0.0).sum(), count) for name, values in per_token.items()}
    largest = torch.where(loss_mask, difference.abs(), 0.0).max()
    return sums | {"sampling/sampling_logp_difference/max": Metric(largest, count, "max")}


def _k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - x - 1, with expm1: for the differences of two systems that agree, exp(x) - 1 would be rounding alone."""
    return log_ratio.expm1() - log_ratio
