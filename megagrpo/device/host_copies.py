"""Bytes between device and host that move beside what is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megagrpo import device

Event = torch.cuda.Event


class HostCopies:
    """Copies on a stream of their own, in the order in which they are asked for. Who gives or gets tensors keeps them until `wait`."""

    def __init__(self):
        self._stream = torch.cuda.Stream()

    def to_host(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        """Copies of bytes as the device holds them once everything asked of it so far is computed; when they are complete."""
        hosts = [device.host_bytes(source.numel()) for source in sources]
        return hosts, self._copy(sources, hosts)

    def to_device(self, hosts: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        """The same way back."""
        targets = [torch.empty(host.shape, dtype=host.dtype, device=device.device()) for host in hosts]
        return targets, self._copy(hosts, targets)

    def wait(self, event: Event) -> None:
        """Have the device compute nothing more before the copies are complete."""
        torch.cuda.current_stream().wait_event(event)

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Event:
        # The memory of the targets may still be read, and the sources still be written, by what was asked for before.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()
