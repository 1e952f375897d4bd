"""A Megatron checkpoint as a Hugging Face folder, which transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path

from megagrpo.bridge.adapters import ADAPTER_FILES
from megagrpo.bridge.export import save_hf
from megagrpo.bridge.megatron_io import HF_FILES, load_model
from megagrpo.bridge.sources import resolve_model
from megagrpo.config import ParallelSection
from megagrpo.parallel.layout import Layout, init_layout
from megagrpo.policy.build import build_model, weights_dtype
from megagrpo.policy.hf_config import load_hf_config


def export_hf(checkpoint: Path, out: Path, model: str | None, layout: Layout) -> None:
    """Write `out`: safetensors in the dtype of the model's config.json, config and tokenizer. Collective.

    `model` names the Hugging Face model that the weights started from; None takes config and tokenizer that the checkpoint carries.
    ValueError when it carries none, when it holds an adapter only, and when it does not fit.
    """
    if (checkpoint / ADAPTER_FILES).is_dir():
        raise ValueError(f"{checkpoint} holds an adapter and no weights; merge it: merge_adapter.py {checkpoint / ADAPTER_FILES} {out}")
    if model is None and not (checkpoint / HF_FILES).is_dir():
        raise ValueError(f"{checkpoint} carries no {HF_FILES} folder with config.json; name the model it started from with --model")
    source = resolve_model(model) if model else checkpoint / HF_FILES
    hf_config = load_hf_config(source)
    chunks = build_model(hf_config, layout, dtype=weights_dtype(hf_config), init_weights=False)
    load_model(chunks, checkpoint, layout)
    save_hf(chunks, hf_config, layout, out, source)


def export_alone(checkpoint: Path, out: Path) -> None:
    """The same in a world of this process alone."""
    layout = init_layout(ParallelSection())
    try:
        export_hf(checkpoint, out, None, layout)
    finally:
        layout.close()
