"""Model weights in Megatron's distributed checkpoint format, which reads back in any parallel layout."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from megagrpo.bridge.export import copy_side_files, refuse_non_empty
from megagrpo.parallel.layout import Layout
from megagrpo.parallel.together import together

from megatron.core import dist_checkpointing  # isort: skip  (after megagrpo.parallel, which prepares the platform)
from megatron.core.utils import unwrap_model  # isort: skip

HF_FILES = "hf"  # subfolder with config.json and the tokenizer, which the way back needs
# The one sharding of the distributed optimizer's state that moves between tensor- and pipeline-parallel sizes; weights alone do not care,
# but a checkpoint of weights and one of training then say the same about themselves.
METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "distrib_optim_sharding_type": "fully_reshardable"}


def model_state(chunks: list[nn.Module], layout: Layout) -> dict[str, Any]:
    """Sharded state of the chunks: under "model" when there is one, "model0", "model1", ... for virtual pipeline stages."""
    metadata = METADATA | {"dp_cp_group": layout.dp_cp_group}
    return {name: unwrap_model(chunk).sharded_state_dict(metadata=metadata) for name, chunk in _named(chunks)}


def save_model(chunks: list[nn.Module], folder: str | Path, layout: Layout, source_folder: str | Path) -> None:
    """Write the weights of all ranks into `folder`, and config and tokenizer of `source_folder` into its subfolder hf. Collective.

    The folder appears complete or not at all. Raises ValueError when it exists and is not empty.
    """
    folder = Path(folder)
    refuse_non_empty(folder, layout)
    unfinished, writer = folder.with_name(f".{folder.name}.partial"), layout.world_rank == 0
    try:
        together(layout, lambda: _prepare(unfinished), here=writer)
        together(layout, lambda: _write(chunks, unfinished, layout))
        together(layout, lambda: _publish(unfinished, folder, Path(source_folder)), here=writer)
    except BaseException:
        if writer:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _prepare(unfinished: Path) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _write(chunks: list[nn.Module], folder: Path, layout: Layout) -> None:
    # The default strategy needs a package that does not install everywhere.
    dist_checkpointing.save(model_state(chunks, layout), str(folder), content_metadata=METADATA, async_strategy="mcore")


def _publish(unfinished: Path, folder: Path, source_folder: Path) -> None:
    (unfinished / HF_FILES).mkdir()
    copy_side_files(source_folder, unfinished / HF_FILES)
    unfinished.rename(folder)


def load_model(chunks: list[nn.Module], folder: str | Path, layout: Layout) -> None:
    """Read the weights that any layout has written, cast to the parameters' dtype; whatever else the checkpoint holds is left alone.
    Collective. Raises ValueError when `folder` is no such checkpoint or does not fit the model."""
    folder = Path(folder)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise ValueError(f"{folder} is no Megatron checkpoint: it lacks the metadata.json of dist_checkpointing")
    try:
        with warnings.catch_warnings():  # about how Megatron calls torch
            warnings.simplefilter("ignore", UserWarning)
            state = dist_checkpointing.load(model_state(chunks, layout), str(folder))
    except Exception as e:  # torch and Megatron raise a dozen types for a missing key or another shape
        raise ValueError(f"{folder} does not fit this model: {e}") from e
    for name, chunk in _named(chunks):
        unwrap_model(chunk).load_state_dict(state[name])


def _named(chunks: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [("model" if len(chunks) == 1 else f"model{i}", chunk) for i, chunk in enumerate(chunks)]
