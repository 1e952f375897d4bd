"""Offloads activations to host memory between the forward and the backward pass.

The tensors that a layer saves for its backward pass are copied to the host while the next layers compute. They are prefetched to the
device while the backward pass of the layers after it runs.

Megatron's own offloading records tensor sizes and the number of micro-batches in the first pass and assumes them for all later passes.
Here both change from step to step. This module uses autograd's saved-tensor hooks, which assume nothing about earlier passes.
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

MIN_BYTES = 2**20  # a smaller tensor stays on the device: moving it costs more than keeping it
LOADED = 3  # layers on the device at a time in the backward pass: the previous one (its memory may still be read), this one, the next


class Kept:
    """The handle that autograd saves in place of a tensor. It holds the tensor, or after offload its index and view in the layer's host
    copy."""

    def __init__(self, layer: LeftLayer, tensor: Tensor):
        self.layer, self.tensor, self.place = layer, tensor, -1
        self.view = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def get(self) -> Tensor:
        """Return the saved tensor, from the device copy that `LeftLayer.load` restores if it was offloaded."""
        self.layer.announce()
        if self.tensor is not None:
            return self.tensor
        dtype, *view = self.view
        memory = self.layer.load()[self.place].untyped_storage()
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, *view)


class LeftLayer:
    """The saved tensors of one layer for one micro-batch. `before` is the offloaded layer whose backward pass runs next; None if there is
    none."""

    def __init__(self, mover: Mover, before: LeftLayer | None):
        self._mover, self._before = mover, before
        self._kept: list[Kept] = []
        self._sources, self._hosts, self._loaded = [], [], None
        self._complete = None

    def keep(self, tensor: Tensor) -> Kept:
        """Record a tensor that autograd saves, and return its handle."""
        kept = Kept(self, tensor)
        self._kept.append(kept)
        return kept

    def leave(self, staying: set[int]) -> None:
        """Copy the saved tensors to the host: each storage once, even if several tensors are views of it.

        Storages whose address is in `staying` stay on the device, as do tensors below MIN_BYTES, subclasses of Tensor and tensors of
        another device.
        """
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
        """Drop this object's references to the saved tensors. Only autograd holds the tensors that stay on the device."""
        self._kept.clear()

    def free(self) -> None:
        """Wait for the copy to the host, then free the device's memory."""
        self._mover.copies.wait(self._complete)
        self._sources.clear()

    def announce(self) -> None:
        """Prefetch this layer and the next one of the backward pass. Called when the backward pass of this layer reads a saved tensor."""
        self.fetch()
        if self._before is not None:
            self._before.fetch()

    def load(self) -> list[Tensor]:
        """Return the offloaded storages on the device, as uint8 tensors, after their copy from the host has finished."""
        self.fetch()
        self._mover.copies.wait(self._complete)
        return self._loaded

    def fetch(self) -> None:
        """Start the copy back to the device, once."""
        if self._loaded is None and self._hosts:
            self._loaded, self._complete = self._mover.copies.to_device(self._hosts)
            self._mover.has_loaded(self)

    def unload(self) -> None:
        """Drop the restored device copy."""
        if self._loaded is not None:
            self._mover.copies.wait(self._complete)  # a copy still writes to this memory; free it only afterwards
        self._loaded = None

    __del__ = unload


class Mover:
    """Offloads the saved tensors of one decoder's layers. `leaving` holds the id() of each layer to offload."""

    def __init__(self, leaving: set[int]):
        self.leaving, self.copies = leaving, HostCopies()
        self.layer: LeftLayer | None = None
        self.within: nn.Module | None = None  # the layer whose forward pass is running; None in backward passes, which may recompute layers
        self.shared: frozenset[int] = frozenset()
        self._last: LeftLayer | None = None  # the last layer that was offloaded in this pass
        self._on_its_way: LeftLayer | None = None
        self._loaded: deque[weakref.ref[LeftLayer]] = deque()

    def begin(self, layer: nn.Module) -> None:
        """Start the record of a layer's saved tensors, at the start of its forward pass."""
        self.within, self.layer = layer, LeftLayer(self, self._last)

    def end(self) -> None:
        """Offload a layer's saved tensors at the end of its forward pass. Their device memory is freed when the next offloaded layer ends:
        the copy overlaps with the layers in between."""
        if id(self.within) not in self.leaving:
            self.layer.stay()
            return
        self.layer.leave(self.shared | {memory for module in self.within.modules() for memory in _rounded_weights(module)})
        self.free()
        self._on_its_way = self._last = self.layer

    def free(self) -> None:
        """Free the device memory of the layer whose copy to the host is in flight, if any."""
        if self._on_its_way is not None:
            self._on_its_way.free()
        self._on_its_way = None

    def close(self) -> None:
        """Reset the state of the forward pass after all layers, whether the pass succeeded or raised."""
        self.within = self.layer = self._last = self._on_its_way = None

    def has_loaded(self, layer: LeftLayer) -> None:
        """Note a layer that is back on the device, and unload the oldest when more than LOADED are."""
        self._loaded.append(weakref.ref(layer))
        if len(self._loaded) > LOADED and (oldest := self._loaded.popleft()()) is not None:
            oldest.unload()


def offload_activations(chunks: Sequence[nn.Module], share: float) -> None:
    """Offload the saved tensors of a `share` of the decoder layers of the bare `chunks`, spread evenly, to host memory.

    The last decoder layer of a model stays on the device, because its backward pass comes at once. Results do not change.
    """
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
    """A decoder that passes its layers' saved tensors through a `Mover`."""

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
        """Forward pre-hook of a layer: ends the previous layer's forward pass and begins this layer's."""
        if self.mover.within is not None and layer is not self.mover.within:
            self.mover.end()
            self.mover.begin(layer)


def _tensors(values: Iterator) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


def _rounded_weights(module: nn.Module) -> Iterator[int]:
    """Yield the addresses of Transformer Engine's FP8 copies of the module's weights. All micro-batches of a step share them."""
    for weight in getattr(module, "_fp8_workspaces", {}).values():
        for data in weight.get_data_tensors():
            if data is not None:
                yield data.untyped_storage().data_ptr()
