"""Copies between device and host that overlap with computation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megagrpo.platform import device

Event = torch.cuda.Event


class HostCopies:
    """Runs copies in call order on its own CUDA stream. The caller must keep sources and targets until `wait`."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def to_host(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        """Start copies of uint8 tensors [n] to the host, after queued device work. Return them and the end event."""
        hosts = [device.host_bytes(source.numel()) for source in sources]
        return hosts, self._copy(sources, hosts)

    def to_device(self, hosts: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        """Start copies of uint8 host tensors [n] to the device; return them and the event of completion."""
        targets = [torch.empty(host.shape, dtype=host.dtype, device=device.device()) for host in hosts]
        return targets, self._copy(hosts, targets)

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
