"""Counts FLOPs, bytes, launches and messages of each operation, and the memory of all tensors that exist, by phase."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megagrpo.proof.plan.roofline import TRACE_PHASES, Costs, Kernel, Message
from megagrpo.proof.plan.tracing.without_floats import aten, without_data

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
    """Return the bytes of a tensor that a kernel reads or writes. An expanded tensor has only the bytes of its
    storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class StepCounter:
    """Receives each operation of a `WithoutFloats` mode. `phase` is the current phase of the step, which the caller
    sets.

    A backward pass that autograd runs counts as the phase `backward`, recomputation included.
    """

    def __init__(self) -> None:
        self.phase = "build"
        self.costs = Costs()
        self._memory: Counter[str] = Counter()  # phase of allocation -> bytes now
        self._alive: dict[int, tuple[str, int]] = {}
        self.peak: dict[str, float] = {}

    @property
    def now(self) -> str:
        """The current phase."""
        computing = self.phase in ("forward", "head")
        return "backward" if computing and torch._C._current_graph_task_id() != -1 else self.phase

    def begin(self) -> None:
        """Reset the counts. Memory that exists still counts towards the peak."""
        self.costs, self.peak = Costs(), dict(self._memory)

    def __call__(self, func: Any, inputs: Any, outputs: Any) -> None:
        """Count one operation with its inputs and outputs."""
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

    def _remember(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
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
