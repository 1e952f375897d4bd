"""Samples -> balanced micro-batches, and the one place where tokens are shifted into labels.

Every rank packs the same list of samples with the same arithmetic and keeps its own share, so no communication is needed and every
data-parallel rank gets the same number of micro-batches: pipeline schedules and collectives cannot hang on a missing one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

from megagrpo.types import MicroBatch, TrainBatch, TrainSample


@dataclass(frozen=True)
class PackingRules:
    """`max_tokens` is strict. `at_least` micro-batches per rank keep a pipeline busy; their number is a multiple of `multiple_of`
    (interleaved schedules need the pipeline size); T is padded to a multiple of `align` (sequence parallelism needs the tensor-parallel
    size)."""

    max_tokens: int
    at_least: int = 1
    multiple_of: int = 1
    align: int = 1
    skip_zero_advantage: bool = False


def pack(samples: Sequence[TrainSample], rules: PackingRules, dp_rank: int = 0, dp_size: int = 1) -> TrainBatch:
    """The micro-batches of data-parallel rank `dp_rank`, and the counts of the whole step.

    Samples left out for zero advantage still count, so the update is the same. Raises ValueError when a sample exceeds the token budget.
    """
    trained = [s for s in samples if not (rules.skip_zero_advantage and s.advantage == 0)]
    bins = assign([s.token_ids.numel() for s in trained], rules, dp_size)
    mine = bins[dp_rank::dp_size]
    return TrainBatch(
        micro_batches=tuple(build_micro_batch([trained[i] for i in indices], rules.align) for indices in mine),
        num_tokens=sum(int(loss_mask_of(s).sum()) for s in samples),
        num_sequences=len(samples),
    )


def assign(lengths: Sequence[int], rules: PackingRules, num_ranks: int) -> list[list[int]]:
    """Sample indices of each micro-batch: k * num_ranks bins for the smallest admissible k, longest sample first into the emptiest bin.

    Bin b belongs to rank b % num_ranks. Every bin holds at most `max_tokens` after alignment.
    """
    budget = rules.max_tokens // rules.align * rules.align
    longest = max(lengths, default=0)
    if longest > budget:
        raise ValueError(
            f"a sample of {longest} tokens exceeds train.max_tokens_per_micro_batch {rules.max_tokens}; raise it to {longest} or more"
        )
    per_rank = max(rules.at_least, ceil(sum(lengths) / budget / num_ranks), 1)
    while True:
        per_rank = ceil(per_rank / rules.multiple_of) * rules.multiple_of
        bins = _fill(lengths, per_rank * num_ranks, budget)
        if bins is not None:
            return bins
        per_rank += 1


def _fill(lengths: Sequence[int], num_bins: int, budget: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        emptiest = min(range(num_bins), key=lambda b: (loads[b], b))
        if loads[emptiest] + lengths[index] > budget:
            return None
        bins[emptiest].append(index)
        loads[emptiest] += lengths[index]
    return [sorted(b) for b in bins]


def build_micro_batch(samples: Sequence[TrainSample], align: int = 1) -> MicroBatch:
    """Pack samples end to end. With none (a rank that got no sample), two tokens that count for nothing stand in: every rank must run
    its backward pass, or the others wait for it for ever."""
    token_ids = [s.token_ids for s in samples]
    rows = [(s.token_ids, loss_mask_of(s), _shift(s.rollout_logprobs), torch.full((s.token_ids.numel(),), s.advantage)) for s in samples]
    used = sum(t.numel() for t in token_ids)
    padding = -used % align if used else max(2, align)
    if padding:
        zeros = torch.zeros(padding)
        rows.append((torch.zeros(padding, dtype=torch.int64), torch.zeros(padding, dtype=torch.bool), zeros, zeros))
    ids, masks, rollout_logprobs, advantages = (list(column) for column in zip(*rows, strict=True))
    lengths = torch.tensor([t.numel() for t in ids])
    return MicroBatch(
        token_ids=torch.cat(ids),
        labels=torch.cat([_shift(t) for t in ids]),
        position_ids=torch.cat([torch.arange(int(n)) for n in lengths]),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()]),
        loss_mask=torch.cat(masks),
        advantages=torch.cat(advantages).float(),
        rollout_logprobs=torch.cat(rollout_logprobs).float(),
    )


def loss_mask_of(sample: TrainSample) -> torch.Tensor:
    """[L] bool, label-aligned: True at t when token t + 1 is part of the response."""
    return _shift(sample.response_mask)


def _shift(row: torch.Tensor) -> torch.Tensor:
    """Move a token-aligned row [L] one place left, so that position t speaks of token t + 1; the last place becomes 0."""
    return torch.cat([row[1:], row.new_zeros(1)])


def imbalance(batch_tokens: Sequence[int]) -> float:
    """Largest over mean number of tokens per rank: 1.0 is perfect balance."""
    return max(batch_tokens) * len(batch_tokens) / max(sum(batch_tokens), 1)
