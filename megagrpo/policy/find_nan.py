"""Finds the first NaN or infinity of a step, so that every rank skips the step and the error names the tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megagrpo.platform import device
from megagrpo.policy.fp8.tensor import dense
from megagrpo.train_types import Metric

# the most likely cause comes first
TENSOR_KINDS = ("weight", "gradient", "gradient summed over ranks")


@dataclass(frozen=True)
class BadTensor:
    """A tensor with NaN or infinity; `kind` is one of `TENSOR_KINDS`. `name` is the parameter's name on that rank; in
    later virtual stages it starts with "chunkN."."""

    kind: str
    name: str
    rank: int
    order: tuple[int, int, int]  # (chunk, pipeline stage, index in the stage); sorts in the order of the forward pass


class NonFiniteError(RuntimeError):
    """Raised if a step's loss or gradient is NaN or infinite. The step changes nothing. All ranks raise the error.

    `tensor` is None when only the loss is bad. `metrics` are the step's metrics, the loss included. `about` follows
    where the NaN is in messages.
    """

    def __init__(self, tensor: BadTensor | None, metrics: dict[str, Metric], about: str = ""):
        where = (
            f"NaN or infinity in {tensor.kind} {tensor.name} on rank {tensor.rank}"
            if tensor
            else "all gradients are finite"
        )
        self.loss = metrics["loss"].value
        super().__init__(f"{where}{about}; the loss is {self.loss:g}")
        self.tensor, self.metrics, self.about = tensor, metrics, about


@dataclass(frozen=True)
class GradientCheck:
    """Which gradients of this rank are finite. The answer stays on the device, so that the host does not wait."""

    kind: str
    names: list[tuple[int, int, str]]  # (chunk, index, name) of each trained parameter
    finite: Tensor  # [parameters] bool, on the device

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], summed: bool) -> GradientCheck:
        """Check gradients now. `summed`: after the reduction, which spreads a NaN to all replicas and can overflow."""
        named = [(name, p.main_grad) for name, p in _named(chunks) if p.requires_grad]
        return cls(
            TENSOR_KINDS[2 if summed else 1], [name for name, _ in named], _finite([gradient for _, gradient in named])
        )

    def first_bad(self, finite: Sequence[bool], pp_rank: int, rank: int) -> BadTensor | None:
        """Return this rank's first non-finite gradient in backward order, or None. `finite` is a copy on the host."""
        bad = [name for name, fine in zip(self.names, finite, strict=True) if not fine]
        return _tensor(self.kind, max(bad, default=None), pp_rank, rank)


def bad_weight(chunks: Sequence[nn.Module], pp_rank: int, rank: int) -> BadTensor | None:
    """Return this rank's first non-finite weight in forward order, or None. Local; the host waits for the device."""
    bad = [name for name, p in _named(chunks) if not dense(p).isfinite().all()]
    return _tensor(TENSOR_KINDS[0], min(bad, default=None), pp_rank, rank)


def first_cause(tensors: Iterable[BadTensor | None]) -> BadTensor | None:
    """Return the bad tensor of all ranks that explains the others; None if there is none.

    It is the first weight of the forward pass, else the first gradient of the backward pass. A rank's own gradient
    comes before a summed one. On a tie the lowest rank wins.
    """
    bad = [tensor for tensor in tensors if tensor is not None]
    kind = min((TENSOR_KINDS.index(tensor.kind) for tensor in bad), default=0)
    alike = [tensor for tensor in bad if tensor.kind == TENSOR_KINDS[kind]]
    if TENSOR_KINDS[kind] == "weight":
        return min(alike, key=lambda tensor: (tensor.order, tensor.rank), default=None)
    return max(alike, key=lambda tensor: (tensor.order, -tensor.rank))


def _finite(tensors: list[Tensor]) -> Tensor:
    """Return which of the tensors have neither NaN nor infinity, [tensors] bool on their device."""
    if not tensors:
        return torch.ones(0, dtype=torch.bool, device=device.device())
    if device.has_gpu():
        return torch.stack(torch._foreach_norm(tensors, ord=math.inf)).isfinite()
    extremes = [torch.stack(torch.aminmax(tensor)) for tensor in tensors]  # a CPU takes 13 times as long for the norm
    return torch.stack(extremes).isfinite().all(1)


def _named(chunks: Sequence[nn.Module]) -> list[tuple[tuple[int, int, str], Any]]:
    """Return ((chunk, index, name), parameter) of every parameter with elements."""
    return [
        ((i, j, f"chunk{i}.{name}" if i else name), p)
        for i, chunk in enumerate(chunks)
        for j, (name, p) in enumerate(unwrap_model(chunk).named_parameters())
        if p.numel()
    ]


def _tensor(kind: str, entry: tuple[int, int, str] | None, pp_rank: int, rank: int) -> BadTensor | None:
    if entry is None:
        return None
    chunk, index, name = entry
    return BadTensor(kind, name, rank, (chunk, pp_rank, index))
