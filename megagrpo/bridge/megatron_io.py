"""Model weights in Megatron's distributed checkpoint format, which reads back in any parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

import megagrpo.parallel  # noqa: F401  (prepares the platform)

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.validation import StrictHandling  # isort: skip
from megatron.core.utils import unwrap_model  # isort: skip

# The one sharding of the distributed optimizer's state that moves between tensor- and pipeline-parallel sizes; model keys follow it too.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def model_state(chunks: list[nn.Module]) -> dict[str, Any]:
    """Sharded state of the chunks: under "model" when there is one, "model0", "model1", ... for virtual pipeline stages."""
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    return {name: unwrap_model(chunk).sharded_state_dict(metadata=METADATA) for name, chunk in zip(names, chunks, strict=True)}


def load_model_state(chunks: list[nn.Module], state: dict[str, Any]) -> None:
    """Put loaded tensors back where `model_state` took them from."""
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    for name, chunk in zip(names, chunks, strict=True):
        unwrap_model(chunk).load_state_dict(state[name], strict=True)


def save_model(chunks: list[nn.Module], folder: str | Path) -> None:
    """Write the weights of all ranks into `folder`, which must exist and be empty. Collective."""
    dist_checkpointing.save(model_state(chunks), str(folder), content_metadata=METADATA)


def load_model(chunks: list[nn.Module], folder: str | Path) -> None:
    """Read weights that any layout has written; the optimizer's part, if there is one, is left alone. Collective.

    Raises ValueError when `folder` is no such checkpoint, or holds another architecture.
    """
    folder = Path(folder)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise ValueError(f"{folder} is no Megatron checkpoint: it holds no metadata.json of dist_checkpointing")
    try:
        state = dist_checkpointing.load(model_state(chunks), str(folder), strict=StrictHandling.RAISE_UNEXPECTED)
    except dist_checkpointing.core.CheckpointingException as e:
        raise ValueError(f"{folder} does not fit this model: {e}") from e
    load_model_state(chunks, state)
