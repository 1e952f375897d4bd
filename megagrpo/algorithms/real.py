"""REAL: classifies a group's responses with positive advantage against the others (ms-swift 4.6's `loss_type: real`).

With s_i the mean log(policy / old) of a sample's tokens over tau, a group with both signs adds log(1 + sum of exp(s_i)
over A <= 0) and log(1 + sum of exp(-s_i) over A > 0). The loss is their sum over the number of groups. A sample's
gradient depends on its whole group, which may lie in other micro-batches and on other ranks. So the derivatives by s_i
are computed beforehand, from all `sample_sums`, and the loss of a micro-batch is linear in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.algorithms.sequences import Sequences
from megagrpo.types import MicroBatch


def sample_sums(micro_batch: MicroBatch, logprobs: Tensor | None) -> Tensor:
    """[S, 4] float64 of each sequence: its sample, that one's advantage, its loss tokens, and their sum of log(policy /
    old). `logprobs` [T] of the policy; None: they are the old ones."""
    sequences = Sequences(micro_batch.sequence_index, micro_batch.loss_mask, micro_batch.num_sequences)
    first = micro_batch.cu_seqlens[:-1].long()
    moved = torch.zeros(micro_batch.num_tokens, dtype=torch.float64)
    if logprobs is not None and micro_batch.terms.old_logprobs is not None:
        moved = logprobs.cpu().double() - micro_batch.terms.old_logprobs.cpu().double()
    columns = (
        micro_batch.samples,
        micro_batch.advantages[first],
        sequences.sums(sequences.mask.double()),
        sequences.sums(moved),
    )
    return torch.stack([column.double() for column in columns], dim=1)


def group_terms(scores: Tensor, advantages: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """(loss of every group [K], derivative of their sum by each score [N]) of samples with `scores` s_i, `advantages`
    and group number [N], 0 to K - 1. A group of one sign has loss and derivatives 0."""
    losses, slopes = scores.new_zeros(int(groups.max()) + 1), torch.zeros_like(scores)
    for group in range(losses.numel()):
        positive, negative = (groups == group) & (advantages > 0), (groups == group) & (advantages <= 0)
        if not (positive.any() and negative.any()):
            continue
        for side, sign in ((negative, 1.0), (positive, -1.0)):
            exponents = torch.cat([scores.new_zeros(1), sign * scores[side]])
            losses[group] += exponents.logsumexp(0)
            slopes[side] = sign * exponents.softmax(0)[1:]
    return losses, slopes


@dataclass(frozen=True)
class RealTerms:
    """The step's loss by sample, [N] each: the numbers of the samples in ascending order; the derivative by the
    log-prob of each of a sample's tokens; and each token's part of the loss itself: a group's is spread evenly over its
    samples, a sample's over its tokens."""

    samples: Tensor
    slopes: Tensor
    values: Tensor

    @classmethod
    def of(cls, sums: Tensor, members: Sequence[int], group_size: int, tau: float) -> RealTerms:
        """From the `sample_sums` [any, 4] of the whole step and the numbers of all its samples, `members`.

        Packing drops samples whose tokens are all masked. They stay in their groups: a sample without loss tokens has
        score 0 and lies on the side of A <= 0, as in ms-swift.
        """
        sums = sums[sums[:, 0] >= 0]
        dropped = sorted(set(members) - set(sums[:, 0].long().tolist()))
        sums = torch.cat([sums, torch.tensor([(i, 0.0, 0.0, 0.0) for i in dropped], dtype=sums.dtype).view(-1, 4)])
        samples, index = sums[:, 0].long().unique(return_inverse=True)
        advantages = sums.new_zeros(samples.numel()).index_copy(0, index, sums[:, 1])
        counts, moved = sums.new_zeros(2, samples.numel()).index_add(1, index, sums[:, 2:].t())
        _, groups = (samples // group_size).unique(return_inverse=True)
        if not samples.numel():
            return cls(samples, counts, counts)
        losses, slopes = group_terms(
            moved / counts.clamp(min=1) / tau, torch.where(counts > 0, advantages, 0.0), groups
        )
        speakers = torch.zeros_like(losses).index_add(0, groups, (counts > 0).double())
        values = (losses / speakers.clamp(min=1))[groups]
        per_token = 1 / (losses.numel() * counts.clamp(min=1))
        return cls(samples, slopes * per_token / tau, values * per_token)

    def rows(self, micro_batch: MicroBatch, scale: float) -> tuple[Tensor, Tensor]:
        """(slopes [T], values [T]) float32 of a micro-batch's loss tokens times `scale`, 0 elsewhere."""
        # the last column: of no sample
        table = self.slopes.new_zeros(2, int(self.samples.max()) + 2 if self.samples.numel() else 1)
        table[:, self.samples] = torch.stack([self.slopes, self.values]) * scale
        rows = table[:, micro_batch.samples[micro_batch.sequence_index]]
        slopes, values = torch.where(micro_batch.loss_mask, rows, 0.0).float()
        return slopes, values
