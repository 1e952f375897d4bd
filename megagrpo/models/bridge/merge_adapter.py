"""Merges an adapter into a model: `megagrpo merge`."""

from __future__ import annotations

from pathlib import Path

import torch

from megagrpo.models.bridge.adapter_files import CONFIG, base_of, load_adapter, read_lora
from megagrpo.models.bridge.hf_export import save_hf
from megagrpo.models.bridge.hf_files import Rounded
from megagrpo.models.bridge.load import load_hf
from megagrpo.models.families.hf_config import load_hf_config
from megagrpo.models.families.weight_sources import resolve_model
from megagrpo.platform.parallel.agree import run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.progress_hook import SILENT, Progress
from megagrpo.policy.build import build_model, weights_dtype
from megagrpo.policy.lora_layers import adapters, attach_adapters
from megagrpo.policy.transformer_config import ModelOptions

ARGUMENT = "ADAPTER"  # name of the command-line argument in errors


def merge(
    adapter: Path,
    out: Path,
    model: str | None,
    layout: Layout,
    progress: Progress = SILENT,
    dtype: torch.dtype | None = None,
) -> Rounded:
    """Write the merged model to `out`: safetensors, config and tokenizer. Collective. `dtype`, `progress` and the
    result are as in `save_hf`."""
    lora = read_lora(adapter, ARGUMENT)
    source = (
        resolve_model(model, "--model")
        if model
        else resolve_model(base_of(adapter), f"{adapter / CONFIG} (or name one with --model)")
    )
    hf_config = load_hf_config(source)
    chunks = build_model(
        hf_config, layout, ModelOptions(dtype=weights_dtype(hf_config), init_weights=False, own_linears=True)
    )
    attach_adapters(chunks, hf_config, lora, recompute="none")
    for added in adapters(chunks):
        # the file holds A and B in float32; in the model's bfloat16 they would be rounded before the sum is
        added.float()
    run_own_and_agree(layout, lambda: load_hf(chunks, hf_config, source, layout, progress))
    load_adapter(chunks, hf_config, layout, adapter, lora, ARGUMENT)
    return save_hf(chunks, hf_config, layout, out, source, dtype=dtype, progress=progress)
