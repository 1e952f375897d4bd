"""Builds tensors without data: the training code builds a model of any size in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def without_data() -> Iterator[None]:
    """Tensors created inside this context have a shape and no data, on any requested device."""
    with _Alone(), FakeTensorMode():
        yield


class _Alone(TorchFunctionMode):
    """Skips all-reduces: pipeline stages that share tied embeddings do not make them equal."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return None if func is dist.all_reduce else func(*args, **(kwargs or {}))
