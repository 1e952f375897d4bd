"""Models that are built to look at their structure: of any size, in no memory and without other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def without_data() -> Iterator[None]:
    """Tensors that are made inside have a shape and no data, on whatever device they were asked for."""
    with _Alone(), FakeTensorMode():
        yield


class _Alone(TorchFunctionMode):
    """Pipeline stages that share tied embeddings do not make them equal."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return None if func is dist.all_reduce else func(*args, **(kwargs or {}))
