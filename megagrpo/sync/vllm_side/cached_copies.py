"""Loads weights again without the model's loaders: replays the copies of the first load, layer by layer.

A model's own loaders take about a millisecond of Python per tensor, and copy the same slices every time. A mixture of
experts has tens of thousands of tensors. So the first update records the copies. Later updates replay the record
through the same steps of vLLM's reload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.platforms import current_platform

from megagrpo.families.shared.boxes import Box
from megagrpo.sync.vllm_side.lazy_tensors import LazyTensor
from megagrpo.sync.vllm_side.reader import ShardReader
from megagrpo.weights.slices.tensor_index import TensorIndex

aten = torch.ops.aten
AHEAD = 2  # filled layers that may wait for processing


@dataclass(frozen=True)
class Cut:
    """One copy of a loader: its destination, and its source.

    The destination is `region` of `parameter`. The source is the meta tensor `view` in `name`, or else `constant`.
    """

    parameter: str
    region: tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, storage offset
    name: str
    view: Tensor | None
    constant: float = 0.0


class Recorder(TorchDispatchMode):
    """Records the copies that a model's loaders make during a reload: enter it around the load. `layers` has the copies
    of each module. `reason` says why the record cannot be replayed; "" means it can."""

    def __init__(self, model: nn.Module):
        super().__init__()
        # storage -> module, name, tensor; the tensor keeps the storage alive
        self.homes: dict[int, tuple[nn.Module, str, Tensor]] = {}
        for module in model.modules():
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                self.homes[tensor.untyped_storage()._cdata] = module, name, tensor
        self.layers: dict[nn.Module, list[Cut]] = {}  # in the order in which their loads began
        self.known: set[tuple[Any, ...]] = set()  # copies that are recorded already
        self.reason = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else None
        if func._schema.is_mutable and isinstance(target, Tensor) and not isinstance(target, LazyTensor):
            home = self.homes.get(target.untyped_storage()._cdata)
            if home is not None:
                self._note(func, home, target, args[1:])
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, home: tuple[nn.Module, str, Tensor], target: Tensor, rest: tuple[Any, ...]) -> None:
        module, name, whole = home
        value: Any = rest[0] if rest else None
        region = _region_of(value.in_view_shape(target) if isinstance(value, LazyTensor) else target)
        if (
            isinstance(value, Tensor)
            and not isinstance(value, LazyTensor)
            and value.data_ptr() == target.data_ptr() != 0
        ):
            return  # a tensor that the reload never moves aside is copied to itself
        if func is aten.copy_.default and isinstance(value, LazyTensor) and isinstance(value.source, ShardReader):
            cut = Cut(name, region, value.name_, value.view_)
        elif func is aten.zero_.default or (func is aten.copy_.default and isinstance(value, LazyTensor)):
            cut = Cut(name, region, "", None)
        elif func is aten.fill_.Scalar:
            cut = Cut(name, region, "", None, value)
        else:
            self._set_reason(f"{type(module).__name__}.{name} is changed by {func}")
            return
        if isinstance(module, (Attention, MLAAttention)) or not isinstance(whole, nn.Parameter):
            self._set_reason(f"{type(module).__name__}.{name} is loaded, but is not a parameter of a plain layer")
        key = module, cut.parameter, cut.region, cut.name, cut.constant, cut.view is not None and _region_of(cut.view)
        if key not in self.known:  # a tensor that was never on the meta device is copied twice
            self.known.add(key)
            self.layers.setdefault(module, []).append(cut)

    def _set_reason(self, reason: str) -> None:
        self.reason = self.reason or reason


class Recipe:
    """The recorded copies of one update, for replay in updates whose index lists the same tensors."""

    def __init__(self, index: TensorIndex, layers: dict[nn.Module, list[Cut]]):
        self.index, self.layers = index, layers

    def fits(self, index: TensorIndex) -> bool:
        """Whether `index` has the dtype, tensors and shapes of the recorded update."""
        if index is self.index:
            return True
        shapes, recorded = (
            {name: tensor.shape for name, tensor in each.tensors.items()} for each in (index, self.index)
        )
        return index.dtype == self.index.dtype and shapes == recorded

    def boxes(self, box_of: Callable[[str, Tensor], tuple[Box, Any]]) -> Iterator[tuple[str, Box]]:
        """Yield (tensor, box) for every fetch that `run` makes."""
        for cuts in self.layers.values():
            yield from (
                (cut.name, box_of(cut.name, cut.view)[0]) for cut in cuts if cut.view is not None and cut.view.numel()
            )

    def run(self, reader: ShardReader) -> None:
        """Fill every layer and let vLLM process it. On a CPU vLLM processes a layer while the next one is read."""
        with _processing() as process:
            for layer, cuts in self.layers.items():
                materialize_layer(layer, get_layerwise_info(layer))
                for cut in cuts:
                    target = getattr(layer, cut.parameter).data.as_strided(*cut.region)
                    if cut.view is None:
                        target.fill_(cut.constant)
                    elif cut.view.numel():
                        reader.fill(cut.name, cut.view, target)
                process(layer)


@contextmanager
def _processing() -> Iterator[Callable[[nn.Module], None]]:
    """Yield the function that runs vLLM's processing of a filled layer. On a CPU it runs in a worker thread, beside the
    next copies; on a GPU it runs on this thread, in stream order."""
    if not current_platform.is_cpu():
        yield _process
        return
    inference, waiting = torch.is_inference_mode_enabled(), list[Future[None]]()

    def process(layer: nn.Module) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            _process(layer)

    with ThreadPoolExecutor(1) as thread:

        def submit(layer: nn.Module) -> None:
            waiting.append(thread.submit(process, layer))
            if len(waiting) > AHEAD:
                waiting.pop(0).result()

        yield submit
        for future in waiting:
            future.result()


def _process(layer: nn.Module) -> None:
    _layerwise_process(layer, get_layerwise_info(layer))


def _region_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return size, stride and storage offset of `tensor` [...], the arguments of `as_strided`."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
