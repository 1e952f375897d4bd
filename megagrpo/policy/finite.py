"""Finds the first NaN or infinity of a step, so that every rank skips the step and the error names the tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megagrpo.policy.fp8.tensor import dense
from megagrpo.types import Metric

KINDS = ("weight", "gradient", "gradient summed over ranks")  # the most likely cause comes first


@dataclass(frozen=True)
class BadTensor:
    """A tensor with NaN or infinity; `kind` is one of `KINDS`. `name` is the parameter's name on that rank; in later virtual stages it
    starts with "chunkN."."""

    kind: str
    name: str
    rank: int
    order: tuple[int, int, int]  # (chunk, pipeline stage, index in the stage); sorts in the order of the forward pass


class NonFiniteError(RuntimeError):
    """Raised when a step's loss or gradient is NaN or infinite. The step changes nothing, and every rank of the world raises the same
    error.

    `tensor` is None when only the loss is bad. `metrics` are the step's metrics, the loss included.
    """

    def __init__(self, tensor: BadTensor | None, metrics: dict[str, Metric]):
        where = f"NaN or infinity in {tensor.kind} {tensor.name} on rank {tensor.rank}" if tensor else "all gradients are finite"
        super().__init__(f"{where}; the loss is {metrics['loss'].value:g}")
        self.tensor, self.metrics = tensor, metrics


def bad_gradient(chunks: Sequence[nn.Module], pp_rank: int, rank: int, summed: bool) -> BadTensor | None:
    """Return the first non-finite gradient of the backward pass on this rank, or None. Local; synchronises with the device once.

    `summed`: whether gradients are read after the reduction over ranks, which spreads a NaN to every replica and can itself overflow.
    """
    bad = _bad(chunks, lambda parameter: parameter.main_grad, trained_only=True)
    return _tensor(KINDS[2 if summed else 1], max(bad, default=None), pp_rank, rank)


def bad_weight(chunks: Sequence[nn.Module], pp_rank: int, rank: int) -> BadTensor | None:
    """Return the first non-finite weight of the forward pass on this rank, or None. Local."""
    bad = _bad(chunks, dense)
    return _tensor(KINDS[0], min(bad, default=None), pp_rank, rank)


def first_cause(tensors: Iterable[BadTensor | None]) -> BadTensor | None:
    """Return the bad tensor of all ranks that explains the others; None if there is none.

    It is the first weight of the forward pass, else the first gradient of the backward pass. A rank's own gradient comes before a summed
    one. On a tie the lowest rank wins.
    """
    bad = [tensor for tensor in tensors if tensor is not None]
    kind = min((KINDS.index(tensor.kind) for tensor in bad), default=0)
    alike = [tensor for tensor in bad if tensor.kind == KINDS[kind]]
    if KINDS[kind] == "weight":
        return min(alike, key=lambda tensor: (tensor.order, tensor.rank), default=None)
    return max(alike, key=lambda tensor: (tensor.order, -tensor.rank))


def _bad(chunks: Sequence[nn.Module], part: Callable[[Any], Tensor], trained_only: bool = False) -> Iterator[tuple[int, int, str]]:
    """Yield (chunk, index, name) of every parameter whose `part` holds NaN or infinity. With `trained_only` skip frozen parameters."""
    named = [
        (i, j, name, p)
        for i, chunk in enumerate(chunks)
        for j, (name, p) in enumerate(unwrap_model(chunk).named_parameters())
        if (p.requires_grad or not trained_only) and p.numel()
    ]
    if not named:
        return
    largest = torch.stack(torch._foreach_norm([part(p) for *_, p in named], ord=math.inf))  # NaN when any element is
    for (i, j, name, _), finite in zip(named, largest.isfinite().tolist(), strict=True):
        if not finite:
            yield i, j, f"chunk{i}.{name}" if i else name


def _tensor(kind: str, entry: tuple[int, int, str] | None, pp_rank: int, rank: int) -> BadTensor | None:
    if entry is None:
        return None
    chunk, index, name = entry
    return BadTensor(kind, name, rank, (chunk, pp_rank, index))
