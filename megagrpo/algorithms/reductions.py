"""Reduces token losses to one number: a sum over the micro-batch, divided once by a count of the optimizer step.

The count is known before the first forward pass, so micro-batch size, packing, gradient accumulation, data and context
parallelism never change the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    parts: Mapping[str, int], prompts: Mapping[str, float], factors: Mapping[str, float], by: str | None
) -> dict[str, float]:
    """Return the weight of each task's tokens in the loss of an optimizer step.

    `parts` are the tasks' parts of the denominator; a response of a group of G counts 1 / G in `prompts`. A task with
    the part D_t and the factor f_t has the share of the loss that f_t D_t has of their sum; with `by` tasks that of
    f_t, with prompts that of f_t times its prompts. A task without a part has none. The weight is the share over
    D_t / D, where D are all parts: the denominator stays, so that weights move the loss from one task to another and
    keep its scale.

    >>> loss_weights({"a": 4, "b": 4}, {"a": 2, "b": 1}, {"a": 3.0, "b": 1.0}, None)
    {'a': 1.5, 'b': 0.5}
    >>> loss_weights({"a": 2, "b": 6}, {"a": 2, "b": 1}, {"a": 1.0, "b": 1.0}, "prompts")
    {'a': 2.6666666666666665, 'b': 0.4444444444444444}
    """
    amounts = {None: parts, "prompts": prompts, "tasks": dict.fromkeys(parts, 1)}[by]
    shares = {task: factors[task] * amounts[task] for task, part in parts.items() if part}
    whole, all_shares = sum(parts.values()), sum(shares.values())
    return {task: share / all_shares * whole / parts[task] for task, share in shares.items()}
