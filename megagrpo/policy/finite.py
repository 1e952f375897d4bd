"""NaN and infinity in a step: where the first one is, so that every rank leaves the step out and a person knows what broke."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megagrpo.policy.fp8.weights import dense

from megatron.core.utils import unwrap_model  # isort: skip


KINDS = ("weight", "gradient", "gradient summed over ranks")  # what explains more comes first


@dataclass(frozen=True)
class BadTensor:
    """One of `KINDS` with NaN or infinity. `name` is the parameter's on that rank; in later virtual stages it starts with "chunkN."."""

    kind: str
    name: str
    rank: int
    place: tuple[int, int, int]  # chunk, pipeline stage and index in it: order of the forward pass


class NonFiniteError(RuntimeError):
    """A step whose loss or gradient is NaN or infinite. Nothing was changed by it; every rank of the world raises the same.

    `tensor` is None when the loss alone is bad. `metrics` are those of the step, the loss among them.
    """

    def __init__(self, tensor: BadTensor | None, metrics: dict[str, float]):
        where = f"{tensor.kind} {tensor.name} on rank {tensor.rank}" if tensor else "no gradient"
        super().__init__(f"NaN or infinity in {where}; the loss is {metrics['loss']:g}")
        self.tensor, self.metrics = tensor, metrics


def bad_gradient(chunks: Sequence[nn.Module], pp_rank: int, rank: int, summed: bool) -> BadTensor | None:
    """The first gradient of the backward pass on this rank that is not finite. Local; waits for the device once.

    `summed`: whether it is read after the sums over ranks, which hand a NaN on to every replica and may overflow themselves.
    """
    found = _bad(chunks, lambda parameter: parameter.main_grad, trained_only=True)
    return _tensor(KINDS[2 if summed else 1], max(found, default=None), pp_rank, rank)


def bad_weight(chunks: Sequence[nn.Module], pp_rank: int, rank: int) -> BadTensor | None:
    """The first weight of the forward pass on this rank that is not finite. Local."""
    found = _bad(chunks, dense)
    return _tensor(KINDS[0], min(found, default=None), pp_rank, rank)


def culprit(tensors: Iterable[BadTensor | None]) -> BadTensor | None:
    """Of what the ranks found the one that explains the others: the first weight of the forward pass, else the first gradient of the
    backward pass, a rank's own before a sum; of equals the lowest rank's."""
    found = [tensor for tensor in tensors if tensor is not None]
    kind = min((KINDS.index(tensor.kind) for tensor in found), default=0)
    alike = [tensor for tensor in found if tensor.kind == KINDS[kind]]
    if KINDS[kind] == "weight":
        return min(alike, key=lambda tensor: (tensor.place, tensor.rank), default=None)
    return max(alike, key=lambda tensor: (tensor.place, -tensor.rank))


def _bad(chunks: Sequence[nn.Module], part: Callable[[nn.Parameter], Tensor], trained_only: bool = False) -> Iterator[tuple[int, int, str]]:
    """(chunk, index, name) of every parameter, or every one that is trained, whose part holds NaN or infinity."""
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


def _tensor(kind: str, found: tuple[int, int, str] | None, pp_rank: int, rank: int) -> BadTensor | None:
    if found is None:
        return None
    chunk, index, name = found
    return BadTensor(kind, name, rank, (chunk, pp_rank, index))
