"""Reduces token losses to one number: a sum over the micro-batch, divided once by a count of the optimizer step.

The count is known before the first forward pass, so micro-batch size, packing, gradient accumulation, data and context
parallelism never change the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
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


def loss_weights(
    tasks: Sequence[str], counts: np.ndarray, factors: Mapping[str, float], by: str | None
) -> np.ndarray | None:
    """Return the weight [n] float64 of each trajectory of an optimizer step in the loss; None if all are 1.

    `tasks` [n] are their tasks, `counts` [n] their parts of the denominator D: loss tokens, or 1 each. A task with the
    part D_t of D and the factor f_t has the share of the loss that f_t D_t has of their sum; with `by` tasks that of
    f_t, with prompts that of f_t times its trajectories. Tasks without loss tokens have none. A trajectory's weight is
    its task's share over D_t / D.

    >>> loss_weights(["a", "a", "b"], np.array([2, 2, 4]), {"a": 3.0, "b": 1.0}, None).tolist()
    [1.5, 1.5, 0.5]
    >>> loss_weights(["a", "a", "b"], np.array([1, 1, 6]), {"a": 1.0, "b": 1.0}, "tasks").tolist()
    [2.0, 2.0, 0.6666666666666666]
    """
    if by is None and len({*factors.values()}) <= 1:
        return None
    names, owners = np.unique(np.asarray(tasks, dtype=object), return_inverse=True)
    parts = np.bincount(owners, counts, names.size)
    shares = np.array([factors[name] for name in names])
    if by is None:
        shares = shares * parts
    elif by == "prompts":
        shares = shares * np.bincount(owners, minlength=names.size)
    shares = np.where(parts > 0, shares, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.where(parts > 0, shares / shares.sum() * parts.sum() / parts, 0.0)
    return weights[owners]
