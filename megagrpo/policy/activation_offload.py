"""Activations in the host's memory: what a layer keeps for its backward pass leaves the device while the next layers are computed, and
comes back while the backward pass of those after it goes on.

Megatron's own offloading learns the sizes and the number of micro-batches in the first pass and takes them for all others; here both change
from step to step, so autograd's hooks for saved tensors do it, which know no passes.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from math import floor

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megagrpo import device
from megagrpo.device.host_copies import HostCopies
from megagrpo.policy.specs import BLOCK

MIN_BYTES = 2**20  # what is smaller stays: it costs more to move than to keep
LOADED = 3  # layers on the device at a time in the backward pass: the one before, whose memory may still be read, this one, the next one


class Kept:
    """What autograd holds in place of a tensor: the tensor while it is on the device, and then where it is."""

    def __init__(self, layer: LeftLayer, tensor: Tensor):
        self.layer, self.tensor, self.place = layer, tensor, -1
        self.view = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def get(self) -> Tensor:
        self.layer.announce()
        if self.tensor is not None:
            return self.tensor
        dtype, *view = self.view
        memory = self.layer.load()[self.place].untyped_storage()
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, *view)


class LeftLayer:
    """What one layer keeps of one micro-batch. Of those that leave, `before` is the one whose backward pass comes next."""

    def __init__(self, mover: Mover, before: LeftLayer | None):
        self._mover, self._before = mover, before
        self._kept: list[Kept] = []
        self._sources, self._hosts, self._loaded = [], [], None
        self._complete = None

    def keep(self, tensor: Tensor) -> Kept:
        kept = Kept(self, tensor)
        self._kept.append(kept)
        return kept

    def leave(self, staying: set[int]) -> None:
        """Copy the memory of all that is kept, once where several tensors are views of it, but for what begins at addresses `staying`."""
        places: dict[int, int] = {}
        for kept in self._kept:
            memory, elsewhere = kept.tensor.untyped_storage(), kept.tensor.device.type != device.device().type
            if type(kept.tensor) is not Tensor or elsewhere or memory.nbytes() < MIN_BYTES or memory.data_ptr() in staying:
                continue
            kept.place = places.setdefault(memory.data_ptr(), len(places))
            if kept.place == len(self._sources):
                self._sources.append(torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory))
            kept.tensor = None
        self._hosts, self._complete = self._mover.copies.to_host(self._sources)
        self.stay()

    def stay(self) -> None:
        """Nothing more leaves: autograd alone holds what stays."""
        self._kept.clear()

    def free(self) -> None:
        """Free the device's copy."""
        self._mover.copies.wait(self._complete)
        self._sources.clear()

    def announce(self) -> None:
        """The backward pass of this layer goes on: have what the next one needs come back beside it."""
        self.fetch()
        if self._before is not None:
            self._before.fetch()

    def load(self) -> list[Tensor]:
        """The memory on the device again."""
        self.fetch()
        self._mover.copies.wait(self._complete)
        return self._loaded

    def fetch(self) -> None:
        if self._loaded is None and self._hosts:
            self._loaded, self._complete = self._mover.copies.to_device(self._hosts)
            self._mover.has_loaded(self)

    def unload(self) -> None:
        if self._loaded is not None:
            self._mover.copies.wait(self._complete)  # memory that is written to must not be given away
        self._loaded = None

    __del__ = unload


class Mover:
    """Moves what the layers `leaving`, by id, of one decoder keep."""

    def __init__(self, leaving: set[int]):
        self.leaving, self.copies = leaving, HostCopies()
        self.layer: LeftLayer | None = None
        self.within: nn.Module | None = None  # whose forward pass goes on; None in backward passes, which may compute layers again
        self.shared: frozenset[int] = frozenset()
        self._last: LeftLayer | None = None  # of this pass that left
        self._on_its_way: LeftLayer | None = None
        self._loaded: deque[weakref.ref[LeftLayer]] = deque()

    def begin(self, layer: nn.Module) -> None:
        """The forward pass of a layer begins."""
        self.within, self.layer = layer, LeftLayer(self, self._last)

    def end(self) -> None:
        """The forward pass of a layer has ended. What leaves is gone when the next that leaves has ended: until then it is copied."""
        if id(self.within) not in self.leaving:
            self.layer.stay()
            return
        self.layer.leave(self.shared | {memory for module in self.within.modules() for memory in _rounded_weights(module)})
        self.free()
        self._on_its_way = self._last = self.layer

    def free(self) -> None:
        """What is on its way has left."""
        if self._on_its_way is not None:
            self._on_its_way.free()
        self._on_its_way = None

    def close(self) -> None:
        """The forward pass of all layers is over, well or not."""
        self.within = self.layer = self._last = self._on_its_way = None

    def has_loaded(self, layer: LeftLayer) -> None:
        self._loaded.append(weakref.ref(layer))
        if len(self._loaded) > LOADED and (oldest := self._loaded.popleft()()) is not None:
            oldest.unload()


def offload_activations(chunks: Sequence[nn.Module], share: float) -> None:
    """Have a `share` of the bare chunks' decoder layers, spread evenly, keep in the host's memory what they keep for the backward pass.
    What the last one of a model keeps stays: its backward pass comes at once. Results are what they were."""
    for chunk in chunks:
        decoder = chunk.decoder
        leaving = [layer for i, layer in enumerate(decoder.layers) if floor((i // BLOCK + 1) * share) > floor(i // BLOCK * share)]
        if decoder.post_process:
            leaving = [layer for layer in leaving if layer not in decoder.layers[-BLOCK:]]
        decoder.mover, decoder.__class__ = Mover({*map(id, leaving)}), _offloading(type(decoder))
        for layer in decoder.layers:
            layer.register_forward_pre_hook(lambda layer, inputs, decoder=decoder: decoder.enter(layer))


@functools.cache
def _offloading(stack: type) -> type:
    return type(f"Offloading{stack.__name__}", (OffloadingStack, stack), {})


class OffloadingStack:
    """A decoder whose layers' saved tensors go through a `Mover`."""

    mover: Mover

    def forward(self, hidden_states: Tensor, **options) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(hidden_states, **options)
        self.mover.shared = frozenset(t.untyped_storage().data_ptr() for t in (*self.parameters(), *_tensors(options.values())))
        self.mover.begin(self.layers[0])
        try:
            with saved_tensors_hooks(lambda tensor: self.mover.layer.keep(tensor), Kept.get):
                output = super().forward(hidden_states, **options)
            self.mover.end()
            self.mover.free()
        finally:
            self.mover.close()
        return output

    def enter(self, layer: nn.Module) -> None:
        """The forward pass of a layer begins, and that of the one before has ended."""
        if self.mover.within is not None and layer is not self.mover.within:
            self.mover.end()
            self.mover.begin(layer)


def _tensors(values: Iterator) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


def _rounded_weights(module: nn.Module) -> Iterator[int]:
    """Addresses of Transformer Engine's weights in FP8, which all micro-batches of a step share."""
    for weight in getattr(module, "_fp8_workspaces", {}).values():
        for data in weight.get_data_tensors():
            if data is not None:
                yield data.untyped_storage().data_ptr()
