"""The clipped GRPO loss and how it is averaged.

A loss is a sum over this micro-batch (`LossOutput.numerator`); what it is divided by is one count over the whole step, known before the
first forward pass (`denominator`). So micro-batch size, packing, gradient accumulation and data parallelism never change the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megagrpo.algorithms.kl import token_kl
from megagrpo.algorithms.mismatch import mismatch_metrics
from megagrpo.config import RunConfig
from megagrpo.types import LossFn, LossInputs, LossOutput, MicroBatch, TrainBatch

Sums = dict[str, tuple[Tensor, Tensor]]


def make_loss(config: RunConfig) -> LossFn:
    """The loss this configuration names, as a function of one micro-batch."""
    algorithm = config.algorithm
    epsilon_high = algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high

    def loss(inputs: LossInputs) -> LossOutput:
        batch, policy = inputs.micro_batch, inputs.policy_logprobs
        old = policy.detach() if batch.old_logprobs is None else batch.old_logprobs
        ratio = (policy - old).exp()
        per_token = clipped_policy_loss(ratio, batch.advantages, algorithm.epsilon, epsilon_high)
        metrics = clip_metrics(ratio, batch, algorithm.epsilon, epsilon_high)
        metrics |= mismatch_metrics(old, batch.rollout_logprobs, batch.loss_mask)
        metrics["entropy"] = masked_sum(inputs.entropy, batch.loss_mask)
        kl = inputs.full_kl
        if batch.ref_logprobs is not None:
            kl = token_kl(policy, batch.ref_logprobs, ratio, algorithm.kl_estimator, algorithm.use_bias_correction_kl)
        if kl is not None:
            per_token = per_token + algorithm.beta * kl
            metrics["kl"] = masked_sum(kl.detach(), batch.loss_mask)
        return LossOutput(numerator=reduce_tokens(per_token, batch, algorithm.loss_type), metrics=metrics)

    return loss


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float) -> Tensor:
    """-min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A) per token (Schulman et al. 2017, eq. 7). All [T]."""
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def reduce_tokens(per_token: Tensor, batch: MicroBatch, loss_type: str) -> Tensor:
    """The numerator: for `grpo` the sum of every sample's token mean, else the sum over loss tokens. per_token [T] -> scalar."""
    masked = torch.where(batch.loss_mask, per_token, 0.0)  # not a product: an infinite value under the mask must not become NaN
    if loss_type != "grpo":
        return masked.sum()
    sequence = sequence_index(batch.cu_seqlens)
    num_sequences = batch.cu_seqlens.numel() - 1
    tokens = torch.zeros(num_sequences, device=masked.device).index_add(0, sequence, batch.loss_mask.float())
    sums = torch.zeros(num_sequences, device=masked.device, dtype=masked.dtype).index_add(0, sequence, masked)
    return (sums / tokens.clamp(min=1)).sum()


def denominator(batch: TrainBatch, loss_type: str, max_completion_length: int) -> int:
    """What the step's numerators are divided by, once: loss tokens (dapo, bnpo), samples (grpo), samples x max_completion_length (dr_grpo).

    A step without loss tokens has numerator 0; its denominator is 1 so that the gradient is 0 and not NaN.
    """
    counts = {
        "dapo": batch.num_tokens,
        "bnpo": batch.num_tokens,
        "grpo": batch.num_sequences,
        "dr_grpo": batch.num_sequences * max_completion_length,
    }
    return max(counts[loss_type], 1)


def sequence_index(cu_seqlens: Tensor) -> Tensor:
    """[T] int64: which of the S packed sequences each token belongs to. cu_seqlens [S + 1]."""
    lengths = cu_seqlens.diff()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of values under the mask, number of them), both float32 scalars."""
    return torch.where(mask, values, 0.0).sum(), mask.sum().float()


def clip_metrics(ratio: Tensor, batch: MicroBatch, epsilon: float, epsilon_high: float) -> Sums:
    """Share of loss tokens whose gradient the clip removes: below with A < 0, above with A > 0, and both."""
    ratio, advantages = ratio.detach(), batch.advantages
    low = (ratio < 1 - epsilon) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    return {
        "clip_ratio/low_mean": masked_sum(low.float(), batch.loss_mask),
        "clip_ratio/high_mean": masked_sum(high.float(), batch.loss_mask),
        "clip_ratio/region_mean": masked_sum((low | high).float(), batch.loss_mask),
    }
