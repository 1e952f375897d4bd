"""Copies between device and host that overlap with computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from megagrpo.platform import device

Event = torch.cuda.Event
# torch rounds each pinned allocation up to a power of two. Tensors share pieces of this size, so a set of tensors takes
# its exact bytes in whole pieces and less than one piece more, not up to twice its bytes.
PINNED_PIECE_BYTES = 2**25
HOST_PIECE_BYTES = 2**28  # of `HostPieces`, whose tensors lie in one piece each
ALIGN_BYTES = 64


class HostCopies:
    """Runs copies in call order on its own CUDA stream. The caller must keep sources and targets until `wait`."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def to_host(self, sources: Sequence[Tensor]) -> tuple[list[list[Tensor]], Event]:
        """Start copies of uint8 tensors [n] to the host, after queued device work. Return the parts of each copy, uint8
        [part], and the end event."""
        hosts = host_parts([source.numel() for source in sources])
        return hosts, self._copy(_split(sources, hosts), list(chain(*hosts)))

    def to_device(self, hosts: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], Event]:
        """Start copies of the parts of uint8 tensors [n] to the device; return the tensors and the event of
        completion."""
        sizes = [sum(part.numel() for part in parts) for parts in hosts]
        targets = [torch.empty(size, dtype=torch.uint8, device=device.device()) for size in sizes]
        return targets, self._copy(list(chain(*hosts)), _split(targets, hosts))

    def wait(self, event: Event) -> None:
        """Make the device's current stream wait until the copies are complete."""
        torch.cuda.current_stream().wait_event(event)

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Event:
        # Work queued earlier may still read the targets' memory or write the sources.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()


class HostPieces:
    """Tensors that stay on the host, as views of shared pieces: whole tensors, of any size, in little more than their
    bytes. A piece is freed with its last tensor."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros of this shape."""
        size = math.prod(shape) * dtype.itemsize
        if (padded := -(-size // ALIGN_BYTES) * ALIGN_BYTES) > self._free.numel():
            self._free = device.host_bytes(max(HOST_PIECE_BYTES, 1 << (padded - 1).bit_length()))
        taken, self._free = self._free[:size], self._free[padded:]
        return taken.view(dtype).view(shape).zero_()


def host_parts(sizes: Sequence[int]) -> list[list[Tensor]]:
    """Return host memory for tensors of these bytes: for each one views, uint8 [part], of pieces of PINNED_PIECE_BYTES.
    The last piece is the smallest power of two that holds the rest."""
    left, free, tensors = sum(sizes), torch.empty(0, dtype=torch.uint8), list[list[Tensor]]()
    for size in sizes:
        parts: list[Tensor] = []
        while size:
            if not free.numel():
                free = device.host_bytes(min(PINNED_PIECE_BYTES, 1 << (left - 1).bit_length()))
            part, free = free[:size], free[size:]
            parts.append(part)
            size, left = size - part.numel(), left - part.numel()
        tensors.append(parts)
    return tensors


def _split(tensors: Sequence[Tensor], hosts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the tensors [n] cut like their parts on the host, in one list."""
    pairs = zip(tensors, hosts, strict=True)
    return [part for tensor, parts in pairs for part in tensor.split([each.numel() for each in parts])]
