"""Moments in host memory (`train.optimizer_offload`) in a traced step: they take no memory of the device, and a step
copies them to the device and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.tracing.roofline import HOST_COPY, Message
from benchmarks.tracing.without_floats import StepCounter, size_of
from megagrpo.platform import device
from megagrpo.platform.device.compact_adam import CompactAdam
from megagrpo.policy.optimizer import policy_optimizer as optimizer


@contextlib.contextmanager
def offloaded_moments(counter: StepCounter) -> Iterator[None]:
    """Context manager: offloaded moments are in host memory, as on a GPU, and their copies count as messages."""
    storage, read, write = CompactAdam._storage, CompactAdam._read, CompactAdam._write

    def stored(adam: CompactAdam, p: Tensor) -> dict[str, Tensor]:
        with counter.on_host() if adam._offload else contextlib.nullcontext():
            return storage(adam, p)

    def copied(adam: CompactAdam, p: Tensor, name: str, part: slice) -> None:
        if adam._offload:
            state = adam.state[p]
            share = (part.stop - part.start) / p.numel()
            size = sum(size_of(state[key]) for key in (name, f"{name}_scale") if key in state)
            counter.costs.messages[Message(counter.now, HOST_COPY, size * share, 1)] += 1

    def reading(adam: CompactAdam, p: Tensor, name: str, part: slice) -> Tensor:
        copied(adam, p, name, part)
        return read(adam, p, name, part).clone()

    def writing(adam: CompactAdam, p: Tensor, name: str, part: slice, *values: Any) -> None:
        copied(adam, p, name, part)
        write(adam, p, name, part, *values)

    generator = torch.Generator  # tensors without data have none of their own
    with (
        mock.patch.object(optimizer, "device", mock.Mock(wraps=device, has_gpu=lambda: True)),
        mock.patch.object(torch, "Generator", lambda *_: generator()),
        mock.patch.object(CompactAdam, "_storage", stored),
        mock.patch.object(CompactAdam, "_read", reading),
        mock.patch.object(CompactAdam, "_write", writing),
    ):
        yield
