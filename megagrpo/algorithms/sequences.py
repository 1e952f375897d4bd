"""Sums and means over the sequences of a pack, given back to each of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """The sequences of one micro-batch. `index` [T] int64 gives a token's sequence; `mask` [T] marks counted tokens."""

    index: Tensor
    mask: Tensor
    num_sequences: int
    # [S] float32, counted tokens of the whole trajectory of each sequence, if it has several samples; None: `lengths`
    divisors: Tensor | None = None

    @classmethod
    def of(cls, cu_seqlens: Tensor, mask: Tensor) -> Sequences:
        """Return the sequences with borders `cu_seqlens` [S + 1] and loss mask [T], both on one device."""
        lengths = cu_seqlens.diff()
        # The known size spares a GPU's host the wait for the sum of the lengths.
        index = torch.repeat_interleave(
            torch.arange(lengths.numel(), device=lengths.device), lengths, output_size=mask.numel()
        )
        return cls(index, mask, lengths.numel())

    def sums(self, values: Tensor) -> Tensor:
        """[S]: sum of `values` [T] over each sequence's counted tokens. Masked values may be infinite or NaN."""
        masked = torch.where(self.mask, values, 0.0)
        return masked.new_zeros(self.num_sequences).index_add(0, self.index, masked)

    def lengths(self) -> Tensor:
        """[S] float32: counted tokens of each sequence, at least 1, so that an empty one divides to 0."""
        return self.sums(self.mask.float()).clamp(min=1)

    def means(self, values: Tensor) -> Tensor:
        """[S]: mean of `values` [T] over each sequence's counted tokens; 0 without any."""
        return self.sums(values) / self.lengths()

    def total_of_means(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of `means`, number of sequences with counted tokens) of `values` [T]; both scalars [] float32."""
        return self.means(values).sum(), (self.sums(self.mask.float()) > 0).sum().float()

    def discounted_ahead(self, values: Tensor, factor: float) -> Tensor:
        """[T]: sum over the token and those that follow it in its sequence of factor^distance times `values` [T]."""
        total, distance = values, 1
        while distance < values.numel():  # doubles the stretch that each sum has seen
            same = self.index[distance:] == self.index[:-distance]
            ahead = torch.where(same, factor**distance * total[distance:], 0.0)
            total = total + torch.nn.functional.pad(ahead, (0, distance))
            distance *= 2
        return total

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[T]: each sequence's entry of `per_sequence` [S] at all its tokens."""
        return per_sequence[self.index]


def masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of `values` [T] under the `mask` [T], number of them); both scalars [] float32."""
    return torch.where(mask, values, 0.0).sum(), mask.sum().float()
