"""How token losses become one number: a sum over this micro-batch, divided once by a count of the whole step.

The count is known before the first forward pass, so micro-batch size, packing, gradient accumulation, data and context
parallelism never change the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megagrpo.algorithms.sequences import Sequences
from megagrpo.config.loss_table import Average
from megagrpo.types import TrainBatch


def numerator(per_token: Tensor, sequences: Sequences, average: Average) -> Tensor:
    """Scalar: the sum of samples' token means, or the sum over loss tokens. Masked per_token [T] may be infinite."""
    if average == "sequence_means":
        return sequences.means(per_token).sum()
    return torch.where(sequences.mask, per_token, 0.0).sum()


def denominator(batch: TrainBatch, average: Average, max_completion_length: int) -> int:
    """What the step's numerators are divided by, once.

    A step without loss tokens has numerator 0; its denominator is 1 so that the gradient is 0 and not NaN.
    """
    if average == "tokens":
        return max(batch.num_tokens, 1)
    if average == "fixed_length":
        return max(batch.num_sequences * max_completion_length, 1)
    return max(batch.num_sequences, 1)
