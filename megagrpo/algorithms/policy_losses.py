"""The policy terms of the losses, per token: minimised, advantages and ratios in, no averaging.

Every term takes `Tokens` and the `algorithm` section and returns [T] with gradient in the policy's log-probs.
`config/sections/loss_table.py` names the term of each loss; how tokens are averaged is in `reductions`. Formulas
are those of the papers named, as TRL 1.16 and ms-swift 4.6 compute them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.algorithms.sequences import Sequences
from megagrpo.config import AlgorithmSection

LOG_RATIO_LIMIT = 20.0  # e^20 is far beyond any clip and far from overflow
LOG_WEIGHT_FLOOR = math.log(1e-8)


@dataclass(frozen=True)
class Tokens:
    """One micro-batch as a policy loss sees it; all [T] float32."""

    logprobs: Tensor  # policy, with gradient
    old_logprobs: Tensor
    ratio: Tensor  # importance ratio policy / old at the configured level, with gradient
    advantages: Tensor
    sequences: Sequences
    correction: Tensor | None = None  # weight of each token for the train-inference mismatch; None: 1


PolicyTerm = Callable[[Tokens, AlgorithmSection], Tensor]


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, sequences: Sequences, level: str) -> Tensor:
    """policy / old per token [T], with gradient in `logprobs`.

    `token`: exp(difference). `sequence`: exp(the sequence's mean difference) at all tokens (GSPO, Zheng et al. 2025,
    arXiv 2507.18071, eq. 7). `sequence_token`: that value with each token's own gradient (GSPO-token, eq. 14).
    """
    difference = logprobs - old_logprobs
    if level == "token":
        return difference.exp()
    of_sequence = sequences.spread(sequences.means(difference))
    if level == "sequence":
        return of_sequence.exp()
    return (logprobs - logprobs.detach() + of_sequence.detach()).exp()


def clipped(t: Tokens, algorithm: AlgorithmSection) -> Tensor:
    """[T]: -min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A): PPO's clip (Schulman et al. 2017, eq. 7),
    with the two-sided bound `delta` of INTELLECT-2 (arXiv 2505.07291) when given."""
    bounded = t.ratio if algorithm.delta is None else t.ratio.clamp(max=algorithm.delta)
    clip = t.ratio.clamp(1 - algorithm.epsilon, 1 + algorithm.upper_epsilon)
    return -torch.minimum(bounded * t.advantages, clip * t.advantages)


def cispo(t: Tokens, algorithm: AlgorithmSection) -> Tensor:
    """[T]: -min(r, epsilon_high) A log policy, the weight without gradient (MiniMax-M1, arXiv 2506.13585, eq. 4).
    `epsilon_high` is the bound itself, not its distance from 1: ScaleRL uses 5."""
    weight = t.ratio.detach().clamp(max=algorithm.upper_epsilon)
    return -weight * t.advantages * t.logprobs


def sapo(t: Tokens, algorithm: AlgorithmSection) -> Tensor:
    """[T]: -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: a soft gate in place of the clip (Gao et al. 2025,
    arXiv 2511.20347)."""
    tau = torch.where(t.advantages > 0, algorithm.sapo_temperature_pos, algorithm.sapo_temperature_neg)
    return -t.advantages * 4.0 / tau * torch.sigmoid(tau * (t.ratio - 1))


def vespo(t: Tokens, algorithm: AlgorithmSection) -> Tensor:
    """[T]: -phi(W) A log policy with W the sequence's whole importance weight, train-inference mismatch included, and
    phi = e^lambda W^k e^(-lambda W), k and lambda by the sign of A, without gradient (VESPO, arXiv 2602.10693)."""
    difference = (t.logprobs - t.old_logprobs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_weight = t.sequences.sums(difference)
    if t.correction is not None:
        log_weight = log_weight + t.sequences.sums(t.correction.log().clamp(LOG_WEIGHT_FLOOR, LOG_RATIO_LIMIT))
    log_weight = t.sequences.spread(log_weight.clamp(LOG_WEIGHT_FLOOR, LOG_RATIO_LIMIT))
    positive = t.advantages >= 0
    k = torch.where(positive, algorithm.vespo_k_pos, algorithm.vespo_k_neg)
    scale = torch.where(positive, algorithm.vespo_lambda_pos, algorithm.vespo_lambda_neg)
    phi = (scale + k * log_weight - scale * log_weight.exp()).exp()
    return -phi * t.advantages * t.logprobs


def gmpo(t: Tokens, algorithm: AlgorithmSection) -> Tensor:
    """[T]: -exp(mean of the clipped log-ratios) A, the same at every token of a sequence: the geometric mean of the
    ratios, each clipped to [-epsilon, epsilon_high] in log space on the side that the advantage pushes to (GMPO, Zhao
    et al. 2025, arXiv 2507.20673)."""
    difference = t.logprobs - t.old_logprobs
    clip = difference.clamp(-algorithm.epsilon, algorithm.upper_epsilon)
    bounded = torch.where(t.advantages > 0, torch.minimum(difference, clip), torch.maximum(difference, clip))
    return -t.sequences.spread(t.sequences.means(bounded)).exp() * t.advantages


def fipo(t: Tokens, algorithm: AlgorithmSection) -> Tensor:
    """[T]: the clipped loss weighted by what followed: exp(sum over s >= t of gamma^(s - t) log r_s), gamma = 2^(-1 /
    fipo_decay_rate), cut to [1 - fipo_clip_range, 1 + fipo_clip_range], or from 1 up. The weight has no gradient;
    tokens with r above `delta` add nothing to it, and where A < 0 and r exceeds `fipo_safety_threshold` it is at most 1
    and may go below (ms-swift 4.6's `loss_type: fipo`)."""
    ratio, span = t.ratio.detach(), algorithm.fipo_clip_range
    moved = (t.logprobs - t.old_logprobs).detach()
    counted = t.sequences.mask if algorithm.delta is None else t.sequences.mask & (ratio <= algorithm.delta)
    weight = t.sequences.discounted_ahead(torch.where(counted, moved, 0.0), 2 ** (-1 / algorithm.fipo_decay_rate)).exp()
    bounded = weight.clamp(1.0 if algorithm.fipo_clip_high_only else 1 - span, 1 + span)
    if algorithm.fipo_safety_threshold is not None:
        unsafe = (t.advantages < 0) & (ratio > algorithm.fipo_safety_threshold)
        bounded = torch.where(unsafe, weight.clamp(1 - span, 1.0), bounded)
    return bounded * clipped(t, algorithm)


def keep_on_policy(
    logprobs: Tensor, sampled_logprobs: Tensor, advantages: Tensor, sequences: Sequences, threshold: float
) -> Tensor:
    """[T] bool: False in sequences with negative advantage that the policy has left: mean log(sampled / policy) above
    `threshold` (DeepSeek-V3.2, 2025, arXiv 2512.02556: off-policy sequence masking). A log-prob that the engine did not
    give (NaN) counts as equal to the policy's."""
    distance = sequences.spread(sequences.means((sampled_logprobs - logprobs).detach().nan_to_num(nan=0.0)))
    return ~((advantages < 0) & (distance > threshold))
