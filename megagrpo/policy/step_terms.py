"""What a loss must know of the whole optimizer step before its first token: which tokens are the most uncertain of all ranks', what a
token's entropy is worth, what a sample's group makes of its score in REAL.

It costs a forward pass over the step where it needs the policy's log-probs or entropies, and nothing where it does not. What it gives are
rows of the micro-batches; with them the loss is a sum over tokens again, in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megagrpo.algorithms.entropy import threshold_of_top
from megagrpo.algorithms.real import RealTerms, sample_sums
from megagrpo.parallel.layout import Layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.types import TrainBatch


def look_ahead(batch: TrainBatch, policy: MegatronPolicy, denominator: int, entropy_coef: float = 0.0) -> TrainBatch:
    """The batch with `high_entropy` below an `algorithm.top_entropy_quantile` of 1, `entropy_weights` for a bonus of `entropy_coef`,
    `slopes` and `values` for `loss_type: real`; as it is when its loss asks for none of them. Collective over the world.

    `denominator` is what the step's loss is divided by; bonus and REAL have their own, and are multiplied by it here.
    """
    algorithm = policy.config.algorithm
    if algorithm.top_entropy_quantile < 1:
        batch = _with_high_entropy(batch, policy)
    if entropy_coef:
        batch = _with_entropy_weights(batch, policy, entropy_coef * denominator)
    if algorithm.loss_type == "real":
        batch = _with_real_terms(batch, policy, denominator)
    return batch


def _with_high_entropy(batch: TrainBatch, policy: MegatronPolicy) -> TrainBatch:
    entropies = [None if row is None else row.cpu() for row in policy.entropies(batch)]
    pairs = [(m.loss_mask, row) for m, row in zip(batch.micro_batches, entropies, strict=True)]
    everyone = _of_all_ranks(policy.layout, [row[mask] for mask, row in pairs if row is not None])
    threshold = threshold_of_top(everyone, policy.config.algorithm.top_entropy_quantile)
    return batch.with_rows(high_entropy=[None if row is None else mask & (row >= threshold) for mask, row in pairs])


def _with_entropy_weights(batch: TrainBatch, policy: MegatronPolicy, total: float) -> TrainBatch:
    """`total` in equal parts on the tokens of all ranks whose policy term counts."""
    counted, number = [m.loss_mask for m in batch.micro_batches], batch.num_tokens
    if policy.config.algorithm.top_entropy_quantile < 1:
        counted = [m.high_entropy for m in batch.micro_batches]
        number = int(_of_all_ranks(policy.layout, [mask.sum()[None] for mask in counted if mask is not None]).sum())
    weights = [None if mask is None else torch.where(mask, total / max(number, 1), 0.0) for mask in counted]
    return batch.with_rows(entropy_weights=weights)


def _with_real_terms(batch: TrainBatch, policy: MegatronPolicy, denominator: int) -> TrainBatch:
    layout, config = policy.layout, policy.config
    moved = any(layout.all_gather_objects(any(m.old_logprobs is not None for m in batch.micro_batches)))
    logprobs = policy.logprobs(batch) if moved else [None] * len(batch.micro_batches)
    mine = [sample_sums(m, row) for m, row in zip(batch.micro_batches, logprobs, strict=True)]
    terms = RealTerms.of(_of_all_ranks(layout, mine), batch.samples, config.rollout.num_generations, config.algorithm.real_tau)
    slopes, values = zip(*(terms.rows(m, denominator) for m in batch.micro_batches), strict=True)
    return batch.with_rows(slopes=slopes, values=values)


def _of_all_ranks(layout: Layout, mine: Sequence[Tensor]) -> Tensor:
    """The rows of all data-parallel ranks, end to end, on every rank. `mine` is heeded where it is the rank that speaks for its replica's
    losses."""
    speaks = layout.is_last_stage and layout.tp_rank == 0 and layout.cp_rank == 0
    return torch.cat([row for rows in layout.all_gather_objects(list(mine) if speaks else []) for row in rows])
