"""Offloads activations to host memory between the forward and the backward pass.

The tensors that a layer saves for its backward pass are copied to the host while the next layers compute. They are
prefetched to the device while the backward pass of the layers after it runs.

Megatron's own offloading records tensor sizes and the number of micro-batches in the first pass and assumes them for
all later passes.
Here both change from step to step. This module uses autograd's saved-tensor hooks, which assume nothing about earlier
passes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import floor
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megagrpo.platform import device
from megagrpo.platform.device.host_copies import HostCopies
from megagrpo.policy.layers.megatron_modules import decoder_of, mix_in
from megagrpo.policy.transformer.specs import LAYERS_PER_BLOCK

MIN_BYTES = 2**20  # a smaller tensor stays on the device: copying it costs more than keeping it
# layers on the device at a time in the backward pass: the previous one (its memory may still be read), this one, the
# next
MAX_LOADED = 3


class SavedTensor:
    """The handle that autograd saves in place of a tensor.

    It holds the tensor. After offload it holds the index of the tensor's storage in the layer's host copy, and the
    tensor's view of that storage.
    """

    def __init__(self, layer: OffloadedLayer, tensor: Tensor):
        self.layer, self.index = layer, -1
        self.tensor: Tensor | None = tensor
        self.dtype, self.view = tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride())

    def get(self) -> Tensor:
        """Return the saved tensor [...]: if it was offloaded, the device copy that `OffloadedLayer.load` restores."""
        self.layer.prefetch()
        if self.tensor is not None:
            return self.tensor
        memory = self.layer.load()[self.index].untyped_storage()
        return torch.empty(0, dtype=self.dtype, device=memory.device).set_(memory, *self.view)


class OffloadedLayer:
    """The saved tensors of one layer for one micro-batch. `before` is the offloaded layer before it in the forward
    pass, if any: its backward pass runs next, so it is prefetched."""

    def __init__(self, offloader: ActivationOffloader, before: OffloadedLayer | None):
        self._offloader, self._before = offloader, before
        self._saved: list[SavedTensor] = []
        self._sources: list[Tensor] = []
        self._hosts: list[list[Tensor]] = []
        self._loaded: list[Tensor] | None = None
        self._complete: Any = None  # event of the last copy

    def save(self, tensor: Tensor) -> SavedTensor:
        """Record a tensor [...] that autograd saves, and return its handle."""
        saved = SavedTensor(self, tensor)
        self._saved.append(saved)
        return saved

    def offload(self, excluded: set[int]) -> None:
        """Start the copy of the saved tensors to the host: each storage once, even if several tensors are views of it.

        Storages whose address is in `excluded` stay on the device, as do tensors below MIN_BYTES, subclasses of Tensor
        and tensors of another device.
        """
        indices: dict[int, int] = {}
        for saved in self._saved:
            tensor = saved.tensor
            if type(tensor) is not Tensor or tensor.device.type != device.device().type:
                continue
            memory = tensor.untyped_storage()
            if memory.nbytes() < MIN_BYTES or memory.data_ptr() in excluded:
                continue
            saved.index = indices.setdefault(memory.data_ptr(), len(indices))
            if saved.index == len(self._sources):
                self._sources.append(torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory))
            saved.tensor = None
        self._hosts, self._complete = self._offloader.copies.to_host(self._sources)
        self.release()

    def release(self) -> None:
        """Drop this object's references to saved tensors. Only autograd holds the tensors that stay on the device."""
        self._saved.clear()

    def free(self) -> None:
        """Wait for the copy to the host, then free the device's memory."""
        self._offloader.copies.wait(self._complete)
        self._sources.clear()

    def prefetch(self) -> None:
        """Start the copy of this layer and of the next one of the backward pass to the device. Called when the backward
        pass of this layer reads a saved tensor."""
        self.fetch()
        if self._before is not None:
            self._before.fetch()

    def load(self) -> list[Tensor]:
        """Return the offloaded storages on the device, uint8 [bytes], after their copy from the host has finished."""
        self.fetch()
        self._offloader.copies.wait(self._complete)
        assert self._loaded is not None, "the layer was not offloaded"
        return self._loaded

    def fetch(self) -> None:
        """Start the copy back to the device, once."""
        if self._loaded is None and self._hosts:
            self._loaded, self._complete = self._offloader.copies.to_device(self._hosts)
            self._offloader.has_loaded(self)

    def unload(self) -> None:
        """Drop the restored device copy."""
        if self._loaded is not None:
            self._offloader.copies.wait(self._complete)  # a copy still writes to this memory; free it only afterwards
        self._loaded = None

    __del__ = unload


class ActivationOffloader:
    """Offloads the saved tensors of one decoder's layers. `offloaded` holds the id() of each layer to offload."""

    def __init__(self, offloaded: set[int]):
        self.offloaded, self.copies = offloaded, HostCopies()
        # the layer whose forward pass is running; None in backward passes, which may recompute layers
        self.within: nn.Module | None = None
        self.layer: OffloadedLayer | None = None  # the saved tensors of that layer
        # addresses of storages that stay on the device: parameters, and inputs of all layers
        self.shared: frozenset[int] = frozenset()
        self._last: OffloadedLayer | None = None  # the last layer that was offloaded in this pass
        self._copying: OffloadedLayer | None = None  # the layer whose copy to the host is in flight
        self._loaded: deque[weakref.ref[OffloadedLayer]] = deque()

    def begin(self, layer: nn.Module) -> None:
        """Start the record of a layer's saved tensors, at the start of its forward pass."""
        self.within, self.layer = layer, OffloadedLayer(self, self._last)

    def save(self, tensor: Tensor) -> SavedTensor:
        """Record a tensor [...] that autograd saves in the running layer, and return its handle."""
        assert self.layer is not None, "no layer of the decoder is running"
        return self.layer.save(tensor)

    def end(self) -> None:
        """Offload a layer's saved tensors at the end of its forward pass. Their device memory is freed when the next
        offloaded layer ends: the copy overlaps with the layers in between."""
        assert self.layer is not None and self.within is not None, "no layer of the decoder is running"
        if id(self.within) not in self.offloaded:
            self.layer.release()
            return
        self.layer.offload(
            {*self.shared, *(memory for module in self.within.modules() for memory in _rounded_weights(module))}
        )
        self.free()
        self._copying = self._last = self.layer

    def free(self) -> None:
        """Free the device memory of the layer whose copy to the host is in flight, if any."""
        if self._copying is not None:
            self._copying.free()
        self._copying = None

    def close(self) -> None:
        """Reset the state of the forward pass after all layers, whether the pass succeeded or raised."""
        self.within = self.layer = self._last = self._copying = None

    def has_loaded(self, layer: OffloadedLayer) -> None:
        """Record a layer that is back on the device, and unload the oldest when more than MAX_LOADED are."""
        self._loaded.append(weakref.ref(layer))
        if len(self._loaded) > MAX_LOADED and (oldest := self._loaded.popleft()()) is not None:
            oldest.unload()


def offload_activations(chunks: Sequence[nn.Module], share: float) -> None:
    """Offload the saved tensors of a `share` of the decoder layers of the bare `chunks`, spread evenly, to host memory.

    A model's last decoder layer stays on the device, because its backward pass comes at once. Results do not change.
    """
    for chunk in chunks:
        decoder = decoder_of(chunk)
        offloaded = [
            layer
            for i, layer in enumerate(decoder.layers)
            if floor((i // LAYERS_PER_BLOCK + 1) * share) > floor(i // LAYERS_PER_BLOCK * share)
        ]
        if decoder.post_process:
            offloaded = [layer for layer in offloaded if layer not in decoder.layers[-LAYERS_PER_BLOCK:]]
        decoder.offloader = ActivationOffloader({*map(id, offloaded)})
        mix_in(decoder, OffloadingStack)
        for layer in decoder.layers:
            layer.register_forward_pre_hook(lambda layer, inputs, decoder=decoder: decoder.enter(layer))


class OffloadingStack:
    """A decoder that passes its layers' saved tensors through an `ActivationOffloader`."""

    offloader: ActivationOffloader

    def forward(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
        """Run the decoder forward, [T, 1, H] to [T, 1, H] of this rank's tokens, and offload what its layers save."""
        if not torch.is_grad_enabled():
            return super().forward(hidden_states, **options)  # type: ignore[misc]  # the decoder's
        self.offloader.shared = frozenset(
            t.untyped_storage().data_ptr() for t in (*self.parameters(), *_tensors(options.values()))
        )
        self.offloader.begin(self.layers[0])
        try:
            with saved_tensors_hooks(lambda tensor: self.offloader.save(tensor), SavedTensor.get):
                output = super().forward(hidden_states, **options)  # type: ignore[misc]
            self.offloader.end()
            self.offloader.free()
        finally:
            self.offloader.close()
        return output

    def enter(self, layer: nn.Module) -> None:
        """Forward pre-hook of a layer: ends the previous layer's forward pass and begins this layer's."""
        if self.offloader.within is not None and layer is not self.offloader.within:
            self.offloader.end()
            self.offloader.begin(layer)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


def _rounded_weights(module: nn.Module) -> Iterator[int]:
    """Yield the addresses of Transformer Engine's FP8 copies of the weights. A step's micro-batches share them."""
    for weight in getattr(module, "_fp8_workspaces", {}).values():
        for data in weight.get_data_tensors():
            if data is not None:
                yield data.untyped_storage().data_ptr()
