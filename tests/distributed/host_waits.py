"""Finds the places where a GPU's host would wait for the device, in a step on a CPU.

On a CPU host and device tensors look the same. `HostWaits` tells them apart by their origin. A device tensor is a
parameter, a tensor that the code moved with `.to(device)`, or the result of an operation on a device tensor. All other
tensors are the host's. A tensor without data (torch's meta device) always counts as a device tensor.

The host waits when it needs a device tensor's numbers (`item`, `tolist`, `cpu`, `if tensor`), or a shape that depends
on them (`nonzero`, selection by a mask, `repeat_interleave` without `output_size`), and when it copies to the device
without `non_blocking`.
"""

from __future__ import annotations

import collections
import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
NEEDS_NUMBERS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.equal,
    aten.masked_select,
    aten._unique2,
    aten.unique_consecutive,
}
PUTS = {aten.index_put, aten.index_put_}
METHODS = ("to", "cpu", "tolist", "numpy")  # a dispatch mode does not see them on a CPU


class HostWaits(TorchDispatchMode):
    """Counts the waits inside `counting`, by name, then by operation and innermost line of the package or of Megatron."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._name: str | None = None
        self._device: dict[int, StorageWeakRef] = {}  # the weak reference keeps the address from being reused
        self._stock = {name: getattr(Tensor, name) for name in METHODS}

    def __enter__(self) -> HostWaits:
        for name in METHODS:
            setattr(Tensor, name, self._method(name))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, method in self._stock.items():
            setattr(Tensor, name, method)

    @contextlib.contextmanager
    def counting(self, name: str) -> Iterator[None]:
        """Context manager: inside it waits count under this name."""
        self._name = name
        try:
            yield
        finally:
            self._name = None

    def counted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return the function, with its calls inside `counting`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.counting(name):
                return function(*args, **kwargs)

        return call

    def mark(self, tensors: Any) -> Any:
        """Mark all tensors in a nested structure as device tensors, and return it."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor) and not self._on_device(leaf):
                self._device[leaf.untyped_storage()._cdata] = StorageWeakRef(leaf.untyped_storage())
        return tensors

    def _on_device(self, x: Any) -> bool:
        return isinstance(x, Tensor) and (x.device.type == "meta" or x.untyped_storage()._cdata in self._device)

    def _note(self, operation: str) -> None:
        if self._name is not None:
            self.waits[self._name][f"{operation} at {innermost_line()}"] += 1

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, operation.overloadpacket
        if not any(map(self._on_device, tree_leaves((args, kwargs)))):
            return operation(*args, **kwargs)
        # a single value is filled in by the mask
        selects = packet is aten.index or (packet in PUTS and args[2].numel() > 1)
        by_mask = selects and any(isinstance(t, Tensor) and t.dtype == torch.bool for t in args[1])
        unsized = packet is aten.repeat_interleave and kwargs.get("output_size") is None
        if packet in NEEDS_NUMBERS or by_mask or unsized:
            self._note(packet.__name__)
        return self.mark(operation(*args, **kwargs))

    def _method(self, name: str) -> Any:
        stock = self._stock[name]

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._on_device(tensor) or not isinstance(args[0] if args else kwargs.get("device"), torch.device):
                return stock(tensor, *args, **kwargs)
            if not kwargs.get("non_blocking"):
                self._note("to(device)")
            return self.mark(stock(tensor, *args, **kwargs).clone())  # a copy, as on a GPU

        def to_host(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._on_device(tensor):
                return stock(tensor, *args, **kwargs)
            self._note(name)
            with torch._C._DisableTorchDispatch():
                return stock(tensor.detach().clone(), *args, **kwargs)

        return to if name == "to" else to_host


def innermost_line() -> str:
    """Return the innermost line of the package or of Megatron, as room/file.py:line."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename == __file__:
            continue
        for package, prefix in (("/megagrpo/", ""), ("/megatron/core/", "megatron/core/")):
            if package in frame.filename:
                return f"{prefix}{frame.filename.rpartition(package)[2]}:{frame.lineno}"
    return "elsewhere"
