"""Reduces token losses to one number: a sum over the micro-batch, divided once by a count of the optimizer step.

The count is known before the first forward pass, so micro-batch size, packing, gradient accumulation, data and context
parallelism never change the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megagrpo.algorithms.sequences import Sequences
from megagrpo.config.sections.loss_table import Average
from megagrpo.train_types import TrainBatch


def numerator(per_token: Tensor, sequences: Sequences, average: Average) -> Tensor:
    """Return the sum of per_token [T] over loss tokens, or with `sequence_means` the sum of the trajectories' means
    over them. Values of other tokens may be infinite.

    The samples of a trajectory may be in different micro-batches and on different ranks: each adds the sum over its own
    tokens, over the number of tokens of all of them.
    """
    if average == "sequence_means":
        lengths = sequences.lengths() if sequences.divisors is None else sequences.divisors
        return (sequences.sums(per_token) / lengths).sum()
    return torch.where(sequences.mask, per_token, 0.0).sum()


def denominator(batch: TrainBatch, average: Average, max_completion_length: int) -> int:
    """Return the divisor of the sum of all ranks' numerators: the loss tokens or the trajectories of the optimizer
    step, or with `fixed_length` trajectories x max_completion_length. At least 1, so that a step without any has the
    gradient 0."""
    if average == "tokens":
        return max(batch.num_tokens, 1)
    if average == "fixed_length":
        return max(batch.num_sequences * max_completion_length, 1)
    return max(batch.num_sequences, 1)
