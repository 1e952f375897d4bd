"""Computes the loss terms that depend on the whole optimizer step: the tokens with the highest entropy over all ranks,
and the weight of each token's entropy.

The choice of tokens costs a forward pass over the step; the weights cost nothing. They become `StepTerms` of the
micro-batches. With them the loss is again a sum over tokens in every layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megagrpo.algorithms.entropy import reach_top, threshold_of_top
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.train_types import TrainBatch


def add_step_terms(
    batch: TrainBatch, policy: MegatronPolicy, denominator: int, entropy_coef: float = 0.0
) -> TrainBatch:
    """Return the batch with the step-wide terms that its loss needs, or unchanged if none. Collective over the world.

    - `high_entropy` [T] bool for an `algorithm.top_entropy_quantile` below 1
    - `entropy_weights` [T] float32 for an entropy bonus with `entropy_coef`

    `denominator` divides the step's loss. The bonus uses another denominator, so its weights are multiplied by it.
    """
    algorithm = policy.config.algorithm
    if algorithm.top_entropy_quantile < 1:
        batch = _with_high_entropy(batch, policy)
    if entropy_coef:
        batch = _with_entropy_weights(batch, policy, entropy_coef * denominator)
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


def _contributes(layout: Layout) -> bool:
    """Whether this rank's numbers count: one rank of each replica, tp and cp rank 0 of the last stage."""
    return layout.is_last_stage and layout.tp_rank == 0 and layout.cp_rank == 0
