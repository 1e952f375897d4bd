"""Computes the loss terms that depend on the whole optimizer step: the tokens with the highest entropy over all ranks,
the weight of each token's entropy, and REAL's terms, which compare the samples of a group.

Terms that need the policy's log-probs or entropies cost a forward pass over the step; the others cost nothing. They
become `StepTerms` of the micro-batches. With them the loss is again a sum over tokens in every layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megagrpo.algorithms.entropy import reach_top, threshold_of_top
from megagrpo.algorithms.real_loss import RealTerms, sample_sums, sums_by_sample
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.train_types import TrainBatch


def add_step_terms(
    batch: TrainBatch, policy: MegatronPolicy, denominator: int, entropy_coef: float = 0.0
) -> TrainBatch:
    """Return the batch with the step-wide terms that its loss needs, or unchanged if none. Collective over the world.

    - `high_entropy` [T] bool for an `algorithm.top_entropy_quantile` below 1
    - `entropy_weights` [T] float32 for an entropy bonus with `entropy_coef`
    - `real_slopes` and `real_values` [T] float32 for `loss_type: real`

    `denominator` divides the step's loss. Bonus and REAL use other denominators, so their terms are multiplied by it.
    """
    algorithm = policy.config.algorithm
    if algorithm.top_entropy_quantile < 1:
        batch = _with_high_entropy(batch, policy)
    if entropy_coef:
        batch = _with_entropy_weights(batch, policy, entropy_coef * denominator)
    if algorithm.loss.whole_step:
        batch = _with_real_terms(batch, policy, denominator)
    return batch


def _with_high_entropy(batch: TrainBatch, policy: MegatronPolicy) -> TrainBatch:
    entropies = [None if row is None else row.cpu() for row in policy.entropies(batch)]
    pairs = [(m.loss_mask, row) for m, row in zip(batch.micro_batches, entropies, strict=True)]
    mine = [row[mask] for mask, row in pairs if row is not None and _contributes(policy.layout)]
    share = policy.config.algorithm.top_entropy_quantile
    threshold = threshold_of_top(torch.cat([torch.zeros(0), *mine]), share, policy.layout.all_reduce)
    return batch.with_terms(
        high_entropy=[None if row is None else mask & reach_top(row, threshold) for mask, row in pairs]
    )


def _with_entropy_weights(batch: TrainBatch, policy: MegatronPolicy, total: float) -> TrainBatch:
    """Split `total` equally over the tokens, of all ranks, that count in the policy term."""
    num_tokens = batch.num_tokens
    counted: list[Tensor | None] = [m.loss_mask for m in batch.micro_batches]
    if policy.config.algorithm.top_entropy_quantile < 1:
        counted = [m.terms.high_entropy for m in batch.micro_batches]
        mine = sum(int(mask.sum()) for mask in counted if mask is not None and _contributes(policy.layout))
        num_tokens = int(policy.layout.all_reduce(torch.tensor(mine)))
    weights = [None if mask is None else torch.where(mask, total / max(num_tokens, 1), 0.0) for mask in counted]
    return batch.with_terms(entropy_weights=weights)


def _with_real_terms(batch: TrainBatch, policy: MegatronPolicy, denominator: int) -> TrainBatch:
    layout, config = policy.layout, policy.config
    # Without old log-probs the current ones are the old ones, so the forward pass is not needed.
    has_old = any(m.terms.old_logprobs is not None for m in batch.micro_batches)
    moves = bool(layout.all_reduce(torch.tensor(int(has_old)), "max"))
    logprobs = policy.logprobs(batch) if moves else [None] * len(batch.micro_batches)
    mine = [sample_sums(m, row) for m, row in zip(batch.micro_batches, logprobs, strict=True)]
    sums = layout.all_reduce(sums_by_sample(mine if _contributes(layout) else (), batch.trajectories))
    terms = RealTerms.of(batch.trajectories, sums, config.rollout.num_generations, config.algorithm.real_tau)
    slopes, values = zip(*(terms.rows(m, denominator) for m in batch.micro_batches), strict=True)
    return batch.with_terms(real_slopes=slopes, real_values=values)


def _contributes(layout: Layout) -> bool:
    """Whether this rank's numbers count: one rank of each replica, tp and cp rank 0 of the last stage."""
    return layout.is_last_stage and layout.tp_rank == 0 and layout.cp_rank == 0
