"""Dense reads and writes of FP8 weights, for code that slices tensors: loading, checkpoints, weight sync."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megagrpo.policy.fp8.masters import store_unrounded
from megagrpo.policy.fp8.tensor import dense, is_fp8


class DenseWeight:
    """View of an FP8 parameter for code that slices tensors: the parameter's attributes, but `data` and `detach()`
    return a new dense copy in its dtype, and `store` writes dense values back."""

    def __init__(self, weight: Tensor):
        self.weight = weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weight, name)

    @property
    def data(self) -> Tensor:
        """The dense values [out, in], a new tensor."""
        return dense(self.weight)

    def detach(self) -> Tensor:
        """Return the dense values [out, in], a new tensor."""
        return dense(self.weight)

    def store(self, values: Tensor) -> None:
        """Write dense `values` [out, in] into the parameter."""
        write_dense(self.weight, values)


@torch.no_grad()
def write_dense(weight: Tensor, values: Tensor) -> None:
    """Replace the values of a weight by `values`, both [out, in]. An FP8 weight rounds them, and its master starts from
    the unrounded values (`masters.store_unrounded`)."""
    weight.copy_(values)
    if is_fp8(weight):
        store_unrounded(weight, values)
