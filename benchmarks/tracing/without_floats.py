"""A torch mode in which floating-point tensors have a shape and no data, while integers are computed, and a counter of
its operations: FLOPs, bytes, launches, messages, and the memory of all tensors that exist, by phase.

Floating-point tensors are on torch's meta device, so a model of any size takes no memory or time. Lengths, masks and
indices are integers or booleans with values, so code that branches on them takes the branches of a real run."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from benchmarks.tracing.roofline import TRACE_PHASES, Costs, Kernel, Message

META, HOST = torch.device("meta"), torch.device("cpu")
aten = torch.ops.aten


def is_float(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype have no data inside the mode."""
    return dtype.is_floating_point or dtype.is_complex


def without_data(value: Any) -> bool:
    """Whether `value` is a tensor without data."""
    return isinstance(value, Tensor) and value.device.type == "meta"


class WithoutFloats(TorchDispatchMode):
    """In this mode new floating-point tensors lack data. `observe(op, inputs, outputs)` is called after each operation.

    Collectives assume that other ranks send the same integers as this rank. A received message of integers is `shape`,
    the shape of the hidden states that pipeline stages exchange.
    """

    def __init__(self, observe: Callable[[Any, Any, Any], None], shape: tuple[int, int, int] = (0, 0, 0)):
        super().__init__()
        self._observe, self._shape = observe, shape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "c10d":
            outputs = _communicate(func, args, self._shape)
        else:
            outputs = _compute(func, args, kwargs)
        self._observe(func, (args, kwargs), outputs)
        return outputs


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation: on the meta device if a tensor has no data, otherwise for real."""
    mixed = tree_any(without_data, (args, kwargs))
    if func is aten._local_scalar_dense.default and mixed:
        return True if args[0].dtype == torch.bool else 1.0 if is_float(args[0].dtype) else 1
    if func is aten.equal.default and mixed:
        return True
    if "device" in kwargs or any(argument.name == "device" for argument in func._schema.arguments):
        kwargs["device"] = _device(func, args, kwargs)
    elif not mixed:
        return func(*args, **kwargs)
    if func is aten._to_copy.default and mixed:
        kwargs["device"] = META
    if mixed:
        args = _concrete_indices(func, args)
        args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
    return func(*args, **kwargs)


def _device(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device:
    """Return the device of a new tensor: without data for floating point, the CPU for integers."""
    dtype = kwargs.get("dtype")
    template = args[0] if args and isinstance(args[0], Tensor) else None
    if dtype is None:
        dtype = template.dtype if template is not None else _default_dtype(func, args)
    copied = template is not None and without_data(template) and func is aten._to_copy.default
    return META if is_float(dtype) or copied else HOST


def _default_dtype(func: Any, args: Any) -> torch.dtype:
    """Return the dtype of a new tensor without a `dtype` argument: of its range or fill value, else torch's default."""
    name = func._schema.name
    numbers = [value for value in args if isinstance(value, int | float)]
    if name == "aten::arange" and all(isinstance(value, int) for value in numbers):
        return torch.int64
    if name == "aten::full" and isinstance(args[1], bool | int):
        return torch.bool if isinstance(args[1], bool) else torch.int64
    return torch.int64 if name in ("aten::randperm", "aten::randint") else torch.get_default_dtype()


def _on_meta(tensor: Tensor) -> Tensor:
    if without_data(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _concrete_indices(func: Any, args: Any) -> Any:
    """Replace boolean masks with data by the indices they select: the number of selected elements must be known."""
    if func not in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return args
    indices: list[Any] = []
    for index in args[1]:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and not without_data(index):
            indices.extend(index.nonzero(as_tuple=True))
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


def _communicate(func: Any, args: Any, shape: tuple[int, int, int]) -> Any:
    """Return a collective's result without sending, and fill in the integers of its outputs, the first argument."""
    names = [argument.name for argument in func._schema.arguments]
    group = args[names.index("process_group")]
    ranks = torch.distributed.ProcessGroup.unbox(group).size()
    _fill_integers(func._schema.name.removeprefix("c10d::"), args, ranks, shape)
    work = torch.ops.c10d.barrier.default(torch.empty(1), group, [], False, -1)
    return work if len(func._schema.returns) == 1 else (args[0], work)


def _fill_integers(name: str, args: Any, ranks: int, shape: tuple[int, int, int]) -> None:
    """Write the integers that a collective would receive if every rank sent what this one sends."""
    outputs = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor) and not without_data(leaf)]
    inputs = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor) and not without_data(leaf)]
    if not outputs:
        return
    if name == "recv_":
        outputs[0].copy_(torch.tensor(shape))
    elif name == "allreduce_":
        for output in outputs:
            output.mul_(ranks)  # a sum; no code takes the maximum of integers
    elif name.startswith(("allgather", "_allgather")):
        for output in outputs:
            output.view(-1).copy_(inputs[0].reshape(-1).repeat(output.numel() // inputs[0].numel()))
    elif name.startswith("alltoall"):
        outputs[0].copy_(inputs[0])


# Operations that launch no kernel, in addition to views.
FREE = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.lift_fresh.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.resize_.default,
    aten.record_stream.default,
}
NEEDS_NUMBERS = {aten._local_scalar_dense.default, aten.equal.default}  # the host waits for the device's numbers


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor that a kernel reads or writes. An expanded tensor has only its storage's bytes."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class StepCounter:
    """Receives each operation of a `WithoutFloats` mode. The caller sets `phase`, the current phase of the step.

    A backward pass that autograd runs counts as the phase `backward`, recomputation included.
    """

    def __init__(self) -> None:
        self.phase = "build"
        self._host = False
        self._on_host: set[int] = set()  # storages
        self.costs = Costs()
        self._memory: Counter[str] = Counter()  # phase of allocation -> bytes now
        self._alive: dict[int, tuple[str, int]] = {}
        self.peak: dict[str, float] = {}

    @property
    def now(self) -> str:
        """The current phase."""
        computing = self.phase in ("forward", "head")
        return "backward" if computing and torch._C._current_graph_task_id() != -1 else self.phase

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Context manager: new tensors are in host memory, so neither they nor their kernels count."""
        before, self._host = self._host, True
        try:
            yield
        finally:
            self._host = before

    def begin(self) -> None:
        """Reset the counts. Memory that exists still counts towards the peak."""
        self.costs, self.peak = Costs(), dict(self._memory)

    def __call__(self, func: Any, inputs: Any, outputs: Any) -> None:
        """Count one operation with its inputs and outputs."""
        if self._host:
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, Tensor):
                    self._keep_on_host(leaf.untyped_storage())
            return
        produced = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        for tensor in produced:
            if without_data(tensor):
                self._remember(tensor)
        read = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        if func in NEEDS_NUMBERS and any(map(without_data, read)):
            self.wait()
        if self.phase not in TRACE_PHASES:
            return  # the host builds the model or a batch
        if func.namespace == "c10d":
            self._message(func, inputs, read)
        elif func not in FREE and not func.is_view and (read or produced):
            self._kernel(func, inputs, outputs, read, produced)

    def _kernel(self, func: Any, inputs: Any, outputs: Any, read: list[Tensor], produced: list[Tensor]) -> None:
        formula = flop_registry.get(func.overloadpacket)
        flops = 0 if formula is None else formula(*inputs[0], **inputs[1], out_val=outputs)
        once = {id(tensor): tensor for tensor in (*read, *produced)}  # an output in place is an input too
        size = sum(map(size_of, once.values()))
        self.add("elementwise" if formula is None else "products", flops, size)

    def wait(self) -> None:
        """Count one wait of the host for the device."""
        if self.phase in TRACE_PHASES:
            self.costs.waits[self.now] += 1

    def add(self, kind: str, flops: float, size: float) -> None:
        """Count one launch of the current phase."""
        self.costs.kernels[Kernel(self.now, kind, flops, size)] += 1

    def _message(self, func: Any, inputs: Any, tensors: list[Tensor]) -> None:
        if not any(map(without_data, tensors)):
            return  # integers, such as lengths and counts
        names = [argument.name for argument in func._schema.arguments]
        group = inputs[0][names.index("process_group")]
        sizes = [
            sum(size_of(tensor) for tensor in tree_leaves(value) if isinstance(tensor, Tensor)) for value in inputs[0]
        ]
        name = func._schema.name.removeprefix("c10d::").strip("_")
        ranks = torch.distributed.ProcessGroup.unbox(group).size()
        self.costs.messages[Message(self.now, name, max(sizes), ranks)] += 1

    def _keep_on_host(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._on_host:
            self._on_host.add(storage._cdata)
            weakref.finalize(storage, self._on_host.discard, storage._cdata)

    def _remember(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._on_host:
            return
        if key in self._alive:
            known, before = self._alive[key]
            if size != before:  # resized
                self._memory[known] += size - before
                self._alive[key] = known, size
        else:
            phase = self.now
            self._alive[key] = phase, size
            self._memory[phase] += size
            weakref.finalize(storage, self._forget, key)
        if sum(self._memory.values()) > sum(self.peak.values()):
            self.peak = dict(self._memory)

    def _forget(self, key: int) -> None:
        phase, size = self._alive.pop(key)
        self._memory[phase] -= size
