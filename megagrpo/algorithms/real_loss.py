"""REAL: classifies a group's responses with positive advantage against the others (ms-swift 4.6's `loss_type: real`).

With s_i the mean log(policy / old) of a sample's tokens over tau, a group with both signs adds log(1 + sum of exp(s_i)
over A <= 0) and log(1 + sum of exp(-s_i) over A > 0). The loss is their sum over the number of groups. A sample's
gradient depends on its whole group, which may lie in other micro-batches and on other ranks. So the derivatives by s_i
are computed beforehand, from all `sums_by_sample`, and the loss of a micro-batch is linear in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.algorithms.sequences import Sequences
from megagrpo.train_types import MicroBatch


def sample_sums(micro_batch: MicroBatch, logprobs: Tensor | None) -> Tensor:
    """[S, 3] float64 of each sequence: its trajectory; its loss tokens, as a negative number if A <= 0; and their
    sum of log(policy / old). `logprobs` [T] of the policy; None: they are the old ones."""
    sequences = Sequences(micro_batch.sequence_index, micro_batch.loss_mask, micro_batch.num_sequences)
    first = micro_batch.cu_seqlens[:-1].long()
    moved = torch.zeros(micro_batch.num_tokens, dtype=torch.float64)
    if logprobs is not None and micro_batch.terms.old_logprobs is not None:
        moved = logprobs.cpu().double() - micro_batch.terms.old_logprobs.cpu().double()
    counts = sequences.sums(sequences.mask.double())
    signed = torch.where(micro_batch.advantages[first] > 0, counts, -counts)
    return torch.stack([micro_batch.trajectories.double(), signed, sequences.sums(moved)], dim=1)


def sums_by_sample(sums: Iterable[Tensor], members: Sequence[int]) -> Tensor:
    """[N, 2] float64: the columns of these `sample_sums` after the first, for the step's samples `members` [N],
    ascending.

    A sample whose prompt is shared has two sequences, one of them with its loss tokens. A sample without loss tokens
    among these sequences has zeros. So the sum over ranks, in any order, has the same bits.
    """
    samples, table = torch.tensor(members, dtype=torch.int64), torch.zeros(len(members), 2, dtype=torch.float64)
    for rows in sums:
        counted = rows[rows[:, 1] != 0]
        table.index_add_(0, torch.searchsorted(samples, counted[:, 0].long()), counted[:, 1:])
    return table


def group_terms(scores: Tensor, advantages: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """(loss of every group [K], derivative of their sum by each score [N]) of samples with `scores` s_i, `advantages`
    and group number [N], 0 to K - 1. A group of one sign has loss and derivatives 0."""
    count, positive = int(groups.max()) + 1, advantages > 0
    sides = 2 * groups + positive  # [N]; each side's loss is the logsumexp of 0 and its exponents
    exponents = torch.where(positive, -scores, scores)
    largest = scores.new_zeros(2 * count).scatter_reduce(0, sides, exponents, "amax")
    weights = (exponents - largest[sides]).exp()
    total = (-largest).exp().index_add(0, sides, weights)
    mixed = (sides.bincount(minlength=2 * count) > 0).view(count, 2).all(1)
    losses = torch.where(mixed, (largest + total.log()).view(count, 2).sum(1), 0.0)
    slopes = torch.where(positive, -weights, weights) / total[sides]
    return losses, torch.where(mixed[groups], slopes, 0.0)


@dataclass(frozen=True)
class RealTerms:
    """The step's loss by sample, [N] each: the numbers of the samples in ascending order; the derivative by the
    log-prob of each of a sample's tokens; and each token's part of the loss itself: a group's is spread evenly over its
    samples, a sample's over its tokens."""

    samples: Tensor
    slopes: Tensor
    values: Tensor

    @classmethod
    def of(cls, members: Sequence[int], sums: Tensor, group_size: int, tau: float) -> RealTerms:
        """From the whole step's samples `members` [N], ascending, and their `sums_by_sample` [N, 2] over all ranks.

        Packing drops samples whose tokens are all masked. They stay in their groups: a sample without loss tokens has
        score 0 and lies on the side of A <= 0, as in ms-swift.
        """
        samples, (signed, moved) = torch.tensor(members, dtype=torch.int64), sums.t()
        counts = signed.abs()
        if not members:
            return cls(samples, counts, counts)
        _, groups = (samples // group_size).unique_consecutive(return_inverse=True)
        losses, slopes = group_terms(moved / counts.clamp(min=1) / tau, signed, groups)
        speakers = torch.zeros_like(losses).index_add(0, groups, (counts > 0).double())
        values = (losses / speakers.clamp(min=1))[groups]
        per_token = 1 / (losses.numel() * counts.clamp(min=1))
        return cls(samples, slopes * per_token / tau, values * per_token)

    def rows(self, micro_batch: MicroBatch, scale: float) -> tuple[Tensor, Tensor]:
        """(slopes [T], values [T]) float32 of a micro-batch's loss tokens times `scale`, 0 elsewhere."""
        index = torch.searchsorted(self.samples, micro_batch.trajectories)  # 0 for padding, which has no loss tokens
        terms = torch.stack([self.slopes, self.values]) if self.samples.numel() else self.slopes.new_zeros(2, 1)
        rows = (terms[:, index] * scale)[:, micro_batch.sequence_index]
        slopes, values = torch.where(micro_batch.loss_mask, rows, 0.0).float()
        return slopes, values
