"""Model weights as Megatron's distributed checkpoint sees them: sharded state, and where each parameter's parts lie in it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megagrpo.bridge.families import blocks
from megagrpo.bridge.torch_dist import StoredTensors
from megagrpo.bridge.without_data import without_data
from megagrpo.families.blocks import Block
from megagrpo.families.config import HfConfig
from megagrpo.parallel.layout import Layout
from megagrpo.policy.build import build_model, weights_dtype
from megagrpo.policy.model_state import dense_state, load_state, sharded_state

from megatron.core import dist_checkpointing  # isort: skip  (after megagrpo.device, which prepares the platform)
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica  # isort: skip

HF_FILES = "hf"  # subfolder with config.json and the tokenizer, which the way back needs
# The one sharding of the distributed optimizer's state that moves between tensor- and pipeline-parallel sizes; weights alone do not care,
# but a checkpoint of weights and one of training then say the same about themselves. Of the ranks that share parameters one gathers their
# state, over gloo, and writes it; else each would gather all of it.
METADATA = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


def model_state(chunks: list[nn.Module], layout: Layout) -> dict[str, Any]:
    """Sharded state of the chunks: under "model" when there is one, "model0", "model1", ... for virtual pipeline stages."""
    metadata = METADATA | {"dp_cp_group": layout.dp_cp_group}
    return {name: dense_state(sharded_state(chunk, metadata)) for name, chunk in _named(chunks)}


@dataclass(frozen=True, eq=False)
class Part:
    """A parameter of this rank without its numbers: the blocks of Hugging Face tensors in it, and what Megatron stores of it, in one piece
    or in several with a place each in a whole tensor."""

    name: str
    shape: tuple[int, ...]
    blocks: list[Block]
    stored: ShardedTensor | ShardedTensorFactory
    places: list[ShardedTensor]

    def pieces(self, value: Tensor) -> list[ShardedTensor]:
        """What is stored of the parameter when it is `value` [shape]: views of it."""
        if isinstance(self.stored, ShardedTensor):
            return [dataclasses.replace(self.stored, data=value, dtype=value.dtype)]
        return dataclasses.replace(self.stored, data=value).build()

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank, of all that hold the parameter, is the one to write it."""
        return is_main_replica(self.stored.replica_id)


@dataclass(frozen=True)
class Structure:
    """A model of any size that takes no memory."""

    parts: list[Part]
    dtype: torch.dtype  # of the parameters in training


def structure(hf_config: HfConfig, layout: Layout) -> Structure:
    """This rank's part of the model. ValueError when it cannot be cut into the layout. No communication."""
    dtype = weights_dtype(hf_config)
    with without_data():
        chunks = build_model(hf_config, layout, dtype=dtype, init_weights=False)
        state = model_state(chunks, layout)
        stored = {f"chunk{i}.{name}" if i else name: value for i, held in enumerate(state.values()) for name, value in held.items()}
        parts = [_part(name, param, found, stored.pop(name)) for name, param, found in blocks(chunks, hf_config, layout)]
    assert not stored, f"stored without blocks: {[*stored]}"
    return Structure(parts, dtype)


def _part(name: str, param: Tensor, found: list[Block], stored: ShardedTensor | ShardedTensorFactory) -> Part:
    return Part(name, tuple(param.shape), found, stored, [stored] if isinstance(stored, ShardedTensor) else stored.build())


def save_frame(folder: Path) -> None:
    """Write the files that make `folder` a distributed checkpoint, as yet of no tensors. Collective."""
    # The default strategy needs a package that does not install everywhere.
    dist_checkpointing.save({}, str(folder), content_metadata=METADATA, async_strategy="mcore")


def load_model(chunks: list[nn.Module], folder: str | Path, layout: Layout) -> None:
    """Read the weights that any layout has written, cast to the parameters' dtype; whatever else the checkpoint holds is left alone.
    Collective. Raises ValueError when `folder` is no such checkpoint or does not fit the model."""
    folder = Path(folder)
    check_is_checkpoint(folder)
    StoredTensors(folder)  # which finds what is damaged or harmful in the index before Megatron reads it
    try:
        with warnings.catch_warnings():  # about how Megatron calls torch
            warnings.simplefilter("ignore", UserWarning)
            state = dist_checkpointing.load(model_state(chunks, layout), str(folder))
    except Exception as e:  # torch and Megatron raise a dozen types for a missing key or another shape
        raise ValueError(f"{folder} does not fit this model: {e}") from e
    for name, chunk in _named(chunks):
        load_state(chunk, state[name])


def check_is_checkpoint(folder: Path) -> None:
    """ValueError when `folder` is no distributed checkpoint."""
    try:
        found = dist_checkpointing.check_is_distributed_checkpoint(str(folder))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'metadata.json'} is corrupt: {error}; copy the checkpoint again") from None
    if not found:
        raise ValueError(f"{folder} is no Megatron checkpoint: it lacks the metadata.json of dist_checkpointing")


def _named(chunks: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    return (("model" if len(chunks) == 1 else f"model{i}", chunk) for i, chunk in enumerate(chunks))
