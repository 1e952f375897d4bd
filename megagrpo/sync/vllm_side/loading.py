"""Loads an update during vLLM's reload: through the model's own `load_weights` over lazy tensors the first time, by
replay of its copies later."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.models.interfaces import supports_multimodal

from megagrpo.sync.vllm_side.cached_copies import Recipe, Recorder
from megagrpo.sync.vllm_side.reader import ShardReader
from megagrpo.sync.vllm_side.receiver import BlankBlocks, BoxCounts
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.tensor_index import TensorIndex

EXPERTS = ".mlp.experts."
logger = logging.getLogger(__name__)


class Loading:
    """Fills the parameters of one worker's model, which are moved aside for a reload; with `towers` also those outside
    the language model of a multimodal model."""

    def __init__(self, model: nn.Module, config: ModelConfig, towers: bool = False):
        self.model, self.config = model, config
        self.trained = model if towers else trained_module(model)
        _name_loaders(self.trained)
        # A tied head shares its parameter with the embedding and appears once here; during a reload it would appear
        # twice.
        trained = {id(parameter) for parameter in self.trained.parameters()}
        self.expected = {name for name, parameter in model.named_parameters() if id(parameter) in trained}
        self.recipe: Recipe | None = None
        self.logged_reason = ""  # the last logged reason why there is no recipe

    def load(self, reader: ShardReader) -> None:
        """Load everything that the index lists. Raises WeightSyncError unless every parameter will be filled."""
        if self.recipe is not None and self.recipe.fits(reader.index):
            self.recipe.run(reader)
        else:
            self._load_and_record(reader)

    def dry_run(self, index: TensorIndex) -> BoxCounts:
        """Return the boxes that `load` will fetch, and how often. The loaders load zeros, then the reload restarts."""
        reader = ShardReader(BlankBlocks(index))
        self._load_and_record(reader)
        finalize_layerwise_reload(self.trained, self.config)
        initialize_layerwise_reload(self.trained)
        return Counter(self.recipe.boxes(reader.box_of)) if self.recipe else reader.fetched

    def _load_and_record(self, reader: ShardReader) -> None:
        self.recipe = None
        # Parameters that vLLM computes from others (products of latent attention) are missing during a reload and
        # recomputed after it.
        loadable = self.expected & {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        destinations = {name: _destination(self.model, name) for name in loadable}
        with Recorder(self.model) as recorder:
            loaded = load_weights(self.model, reader)
        _check_complete(loaded, destinations, reader)
        if not recorder.reason:
            self.recipe = Recipe(reader.index, recorder.layers)
        elif recorder.reason != self.logged_reason:
            self.logged_reason = recorder.reason
            logger.info(
                "weight sync: no replay; every update runs the model's own loaders (slower): %s", recorder.reason
            )


def trained_module(model: nn.Module) -> nn.Module:
    """Return the part of vLLM's model that updates fill if towers are frozen: the language model of a multimodal
    model."""
    if not supports_multimodal(model):
        return model
    whole: Any = model
    language_model: nn.Module = whole.get_language_model()
    return language_model


def _name_loaders(model: nn.Module) -> None:
    """Give weight loaders that are `functools.partial` objects a name, which vLLM's reload reads (the norms of queries
    and keys of MiniMax-M2)."""
    for parameter in model.parameters():
        loader: Any = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial):
            loader.__name__ = "weight_loader"  # type: ignore[attr-defined]


def load_weights(model: nn.Module, reader: ShardReader) -> set[str]:
    """Run the model's loaders over all tensors of `reader`; return the names of the loaded parameters."""
    tensors = reader.tensors()
    # vLLM's GPT-OSS copies a tensor of all experts directly into its parameters, but a tensor of one expert through
    # weight loaders.
    if hasattr(getattr(model, "model", None), "_try_load_streamed_expert"):
        tensors = split_experts(tensors)
    loader: Any = model
    loaded = set(loader.load_weights(tensors))
    _repeat_lost_copies(model, reader)
    return loaded


def split_experts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Split each tensor of all experts into one tensor per expert; other tensors pass unchanged.

    x.mlp.experts.down_proj [experts, ...] becomes x.mlp.experts.0.down_proj [...] and so on, in the same dtype.
    """
    for name, tensor in tensors:
        block, experts, projection = name.partition(EXPERTS)
        if experts:
            yield from ((f"{block}{experts}{number}.{projection}", part) for number, part in enumerate(tensor.unbind()))
        else:
            yield name, tensor


def _repeat_lost_copies(model: nn.Module, reader: ShardReader) -> None:
    """Repeat copies that were lost because a loader copied directly into a parameter without data (the sinks of
    GPT-OSS). The repeated copies go through the weight loader."""
    for module in model.modules():
        info = get_layerwise_info(module)
        if not info.can_load() or info.load_numel > 0:
            continue  # already loaded, or loaded when the update is finished
        # a list, because loading replaces the parameters
        parameters: list[Any] = list(module.parameters(recurse=False))
        for parameter in parameters:
            if (lost := reader.copies.get(parameter.untyped_storage()._cdata)) is not None:
                parameter.weight_loader(parameter, lost)


def _check_complete(loaded: set[str], destinations: dict[str, tuple[int, int, bool]], reader: ShardReader) -> None:
    if absent := sorted(destinations.keys() - loaded):
        raise WeightSyncError(f"no weights received for {first_names(absent)}")
    partial = []
    for name, (storage, numel, padded) in destinations.items():
        arrived = sum(reader.arrivals.get(storage, {}).values())
        if arrived < numel and not (padded and arrived):
            partial.append(f"{name} ({arrived} of {numel} elements)")
    if partial:
        raise WeightSyncError(f"only part of the weights received for {first_names(sorted(partial))}")


def _destination(model: nn.Module, name: str) -> tuple[int, int, bool]:
    """Return (storage, number of elements, whether rows may stay unfilled as padding) of the parameter to be filled."""
    module = model.get_submodule(name.rpartition(".")[0])
    param = model.get_parameter(name)
    numel = param.numel() if (loaded := _padded_experts(module, param)) is None else loaded
    return param.untyped_storage()._cdata, numel, isinstance(module, VocabParallelEmbedding)


def _padded_experts(module: nn.Module, param: Tensor) -> int | None:
    """Return how many elements loaders fill of experts that vLLM pads to whole FP8 blocks; None for other parameters.

    A width that 128 does not divide is padded: 192 of Qwen3-235B on 8 workers becomes 256. vLLM zeroes the rest before
    it quantizes.
    """
    if not isinstance(getattr(module, "quant_method", None), Fp8PerBlockOnlineMoEMethod) or param.dim() != 3:
        return None
    moe: Any = module.moe_config
    padded = moe.hidden_dim * moe.intermediate_size_per_partition
    return param.numel() // padded * moe.hidden_dim_unpadded * moe.intermediate_size_per_partition_unpadded


def first_names(names: list[str]) -> str:
    """Return the first four names as text, and the number of the remaining ones."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class AdapterWrappers:
    """The wrappers in `model`, if it takes adapters. Without them its modules have the names that its loaders know."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._off: list[tuple[nn.Module, str, nn.Module]] = []  # parent, name in it, wrapper

    def take_off(self) -> None:
        """Put the linears in the place of their wrappers. Does nothing on a second call."""
        # imports most of vLLM, which the plugin loader has not done in every process
        from vllm.lora.layers import BaseLayerWithLoRA

        for name, module in [*self.model.named_modules(remove_duplicate=False)]:
            if isinstance(module, BaseLayerWithLoRA):
                parent, _, last = name.rpartition(".")
                self._off.append((self.model.get_submodule(parent), last, module))
        for parent, last, module in self._off:
            setattr(parent, last, module.base_layer)

    def put_back(self) -> None:
        """Put the wrappers back."""
        while self._off:
            setattr(*self._off.pop())
