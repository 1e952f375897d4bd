"""Streams under stress: a copy on a side stream happens as late as CUDA allows, and garbage stands in its target until
then.

The runtime of these tests runs all work at once and in order, so it hides missing waits. With `delay_copies`

- a non-blocking copy on a side stream runs when a stream or the host waits for an event after it. A reader that does
  not wait sees garbage, and a source that is freed or overwritten before is copied as it is then;
- a copy whose stream has not waited for the default stream's last use of source or target delivers garbage.

Messages of NCCL run at once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.cuda import _gpu_trace as trace

from tests.fake_gpu.kernels import Kernels, host_view, on_cuda

DEFAULT = 0  # the default stream's handle


@dataclass
class Delayed:
    """A copy that has not run yet. Views of device memory do not keep it allocated."""

    target: Tensor
    source: Tensor
    too_early: bool

    def run(self) -> None:
        """Copy, or deliver garbage."""
        if self.too_early:
            spoil(self.target)
        else:
            self.target.copy_(self.source)


@dataclass
class Streams:
    """The copies that side streams have not run, and what each stream has waited for. `delayed` counts all delayed
    copies."""

    pending: defaultdict[int, list[Delayed]] = field(default_factory=lambda: defaultdict(list))  # by stream
    issued: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # copies so far, by stream
    done: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # of them, those that have run
    # event -> (stream, copies before it, time of the default stream)
    events: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    # side stream -> time that it has waited for
    seen: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    uses: dict[int, int] = field(default_factory=dict)  # address of a storage -> time of the default stream's last use
    now: int = 0  # functions of the default stream so far
    delayed: int = 0

    def use(self, tensors: list[Tensor]) -> None:
        """Record that the current stream uses these tensors."""
        if torch.cuda.current_stream().cuda_stream == DEFAULT:
            self.now += 1
            self.uses |= {tensor.untyped_storage().data_ptr(): self.now for tensor in tensors}

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> bool:
        """Delay a copy if the current stream is a side stream; return whether it is delayed."""
        stream = torch.cuda.current_stream().cuda_stream
        if stream == DEFAULT or not non_blocking:
            self.run(stream)
            return False
        used = max(
            self.uses.get(tensor.untyped_storage().data_ptr(), 0) for tensor in (target, source) if on_cuda(tensor)
        )
        views = [host_view(tensor) if on_cuda(tensor) else tensor for tensor in (target, source)]
        self.pending[stream].append(Delayed(*views, too_early=used > self.seen[stream]))
        self.issued[stream] += 1
        self.delayed += 1
        spoil(views[0])
        return True

    def record(self, event: int, stream: int) -> None:
        """Record an event after all copies of the stream so far."""
        self.events[event] = stream, self.issued[stream], self.now if stream == DEFAULT else self.seen[stream]

    def wait(self, event: int, stream: int | None = None) -> None:
        """Run the copies before an event, for a stream that waits for it, or for the host."""
        if event not in self.events:
            return
        other, copies, time = self.events[event]
        self.run(other, copies)
        if stream is not None and stream != DEFAULT:
            self.seen[stream] = max(self.seen[stream], time)

    def run(self, stream: int, copies: int | None = None) -> None:
        """Run the copies of a stream: all, or as many as were issued when an event was recorded."""
        while self.pending[stream] and (copies is None or self.done[stream] < copies):
            self.done[stream] += 1
            self.pending[stream].pop(0).run()

    def run_all(self) -> None:
        """Run all copies of all streams, as when the host waits for the device."""
        for stream in list(self.pending):
            self.run(stream)


def delay_copies() -> Streams:
    """Delay copies on side streams from now on in this process, which computes by `Kernels`."""
    assert Kernels.active is not None
    streams, release = Streams(), torch.cuda.empty_cache
    Kernels.active.on_copy, Kernels.active.on_use = streams.copy, streams.use
    trace.register_callback_for_event_record(streams.record)
    trace.register_callback_for_event_wait(streams.wait)
    trace.register_callback_for_event_synchronization(streams.wait)
    trace.register_callback_for_stream_synchronization(streams.run)
    trace.register_callback_for_device_synchronization(streams.run_all)
    torch._C._activate_gpu_trace()

    def empty_cache() -> None:
        """Freeing memory waits for the device."""
        streams.run_all()
        release()

    torch.cuda.empty_cache = empty_cache
    return streams


def spoil(tensor: Tensor) -> None:
    """Fill a CPU tensor with NaN, or with ones of all bits."""
    tensor.fill_(torch.nan if tensor.is_floating_point() else 255 if tensor.dtype == torch.uint8 else -1)
