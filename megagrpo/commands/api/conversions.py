"""Exports of checkpoints to Hugging Face folders, in a parallel layout on the CPU, with user errors as one line.

Conversions compute nothing, and the CPU's layer spec needs no memory for its structure. So they leave GPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.platform.process.imports import without_garbage_collection
from megagrpo.platform.process.terminal import warn
from megagrpo.platform.process.variables import ENVIRONMENT

if TYPE_CHECKING:
    import torch

    from megagrpo.platform.parallel.layout import Layout
    from megagrpo.weights.bridge.hf_files import Rounded

AUTO = "auto"
EXPORT_DTYPES = (AUTO, "float32", "bfloat16", "float16")


def hide_gpus() -> None:
    """Hide all GPUs from torch in this process. Call it before torch is imported."""
    ENVIRONMENT["CUDA_VISIBLE_DEVICES"] = ""


def in_layout(action: Callable[[Layout], None], **sizes: Any) -> int:
    """Run `action` on the CPU in layout `sizes` (keys of `parallel`). Returns 0, or 2 after printing a user error."""
    hide_gpus()
    with without_garbage_collection():
        from megagrpo.config import ParallelSection
        from megagrpo.platform.parallel.agree import RankError
        from megagrpo.platform.parallel.layout import init_layout

    layout = None
    try:
        layers, stages = sizes.get("pipeline_layers"), sizes.get("pp", 1) * sizes.get("vpp", 1)
        if layers and len(layers) != stages:
            raise ValueError(
                f"--pipeline-layers: {len(layers)} number(s) for {stages} stages; give one number per stage"
            )
        layout = init_layout(ParallelSection(**sizes))
        action(layout)
    except (ValueError, OSError) as error:
        warn(f"error: {error}")
        return 2
    except RankError:  # the rank that failed prints the error
        return 2
    finally:
        if layout is not None:
            layout.close()
    return 0


def export(source: Path, out: Path, model: str | None, dtype: str, merged: bool, layout: Layout) -> None:
    """Write the checkpoint or the adapter `source` as the Hugging Face folder `out`, with a model card. Collective.

    `model` names the start model or the base model; None means the one that `source` names. `dtype` is one of
    `EXPORT_DTYPES`. With `merged` an adapter is added to the weights of its base model. Raises ValueError and OSError.
    """
    from megagrpo.platform.parallel.agree import on_first_rank
    from megagrpo.records.checkpoints.run_files import why_no_checkpoint
    from megagrpo.records.progress_bars import conversion_progress
    from megagrpo.weights.bridge.adapter_files import CONFIG, base_of, export_adapter, merge
    from megagrpo.weights.bridge.conversion import export_hf
    from megagrpo.weights.hub.card import write_card

    is_first, progress = layout.world_rank == 0, conversion_progress(layout.world_rank)
    is_adapter = not merged and (source / CONFIG).is_file()
    if is_adapter:
        if dtype != AUTO:
            raise ValueError(f"--dtype: {dtype}, but an adapter is copied as it is; leave the option out")
        on_first_rank(layout, lambda: export_adapter(source, out, model))
        base: str | None = base_of(out)
    elif merged:
        _warn_rounded(out, dtype, merge(source, out, model, layout, progress, _torch_dtype(dtype)))
        base = model or base_of(source)
    else:
        if why := why_no_checkpoint(source):
            raise ValueError(f"CHECKPOINT: {source} {why}")
        _warn_rounded(out, dtype, export_hf(source, out, model, layout, progress, _torch_dtype(dtype)))
        base = model
    if is_first:
        write_card(out, source, base, is_adapter)


def export_here(source: Path, out: Path, model: str | None, dtype: str, merged: bool) -> int:
    """Export in this process, and return the exit code. See `export`."""
    return in_layout(lambda layout: export(source, out, model, dtype, merged, layout))


def _torch_dtype(name: str) -> torch.dtype | None:
    import torch

    return None if name == AUTO else getattr(torch, name)


def _warn_rounded(out: Path, dtype: str, rounded: Rounded) -> None:
    """Print a line when values have been rounded."""
    from megagrpo.weights.bridge.hf_files import rounding

    if line := rounding(rounded, "the start model's dtype" if dtype == AUTO else "--dtype"):
        warn(f"{out.name}: {line}")
