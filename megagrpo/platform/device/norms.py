"""The Euclidean norm of many large float32 tensors, as exact as its inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROW = 4096  # elements summed in float32; the sums of rows are added in float64


def l2_norm(tensors: Sequence[Tensor]) -> float:
    """Return the square root of the sum of all squares, of tensors of any shape.

    `torch.norm` on a CPU adds a tensor's squares in float32, one after another. For 28 million elements its result is
    too small by up to one part in 600.
    """
    return math.sqrt(sum(_sum_of_squares(tensor.detach().reshape(-1)) for tensor in tensors))


def _sum_of_squares(flat: Tensor) -> float:
    whole = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
    return rows.double().square().sum().item() + flat[whole:].double().square().sum().item()


def multi_tensor_l2norm(
    chunk_size: int, noop: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Return `l2_norm` as [1] float32, with the signature of APEX's function of this name, for megatron-core."""
    assert not per_tensor, "megatron-core asks for the norm of all only"
    return torch.tensor([l2_norm([tensor for tensors in tensor_lists for tensor in tensors])]), None
