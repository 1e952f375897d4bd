"""How token losses become one number: a sum over this micro-batch, divided once by a count of the whole step.

The count is known before the first forward pass, so micro-batch size, packing, gradient accumulation, data and context parallelism never
change the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megagrpo.algorithms.sequences import Sequences
from megagrpo.types import TrainBatch

TOKENS = ("bnpo", "dapo", "cispo", "vespo", "fipo", "real")  # sum of tokens / tokens
SEQUENCE_MEANS = ("grpo", "sapo", "gmpo")  # sum of the samples' token means / samples
SEQUENCE_SUMS = ("luspo",)  # sum of tokens / samples
FIXED_LENGTH = ("dr_grpo",)  # sum of tokens / (samples x max_completion_length)


def numerator(per_token: Tensor, sequences: Sequences, loss_type: str) -> Tensor:
    """Scalar: the sum of every sample's token mean, or the sum over loss tokens. per_token [T]; what the mask hides may be infinite."""
    if loss_type in SEQUENCE_MEANS:
        return sequences.means(per_token).sum()
    return torch.where(sequences.mask, per_token, 0.0).sum()


def denominator(batch: TrainBatch, loss_type: str, max_completion_length: int) -> int:
    """What the step's numerators are divided by, once.

    A step without loss tokens has numerator 0; its denominator is 1 so that the gradient is 0 and not NaN.
    """
    if loss_type in TOKENS:
        return max(batch.num_tokens, 1)
    if loss_type in FIXED_LENGTH:
        return max(batch.num_sequences * max_completion_length, 1)
    return max(batch.num_sequences, 1)
