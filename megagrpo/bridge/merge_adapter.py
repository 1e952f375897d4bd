"""Merges an adapter into a model: `megagrpo merge`."""

from __future__ import annotations

from pathlib import Path

import torch

from megagrpo.bridge.adapters import CONFIG, base_of, load_adapter, read_lora
from megagrpo.bridge.export import save_hf
from megagrpo.bridge.hf_files import Rounded
from megagrpo.bridge.load import load_hf
from megagrpo.families.config import load_hf_config
from megagrpo.families.sources import resolve_model
from megagrpo.parallel.agree import run_own_and_agree
from megagrpo.parallel.layout import Layout
from megagrpo.policy.build import build_model, weights_dtype
from megagrpo.policy.lora import adapters, attach_adapters
from megagrpo.process.progress import SILENT, Progress

ARGUMENT = "ADAPTER"  # name of the command-line argument in errors


def merge(
    adapter: Path, out: Path, model: str | None, layout: Layout, progress: Progress = SILENT, dtype: torch.dtype | None = None
) -> Rounded:
    """Write the merged model to `out`: safetensors, config and tokenizer. Collective. `dtype`, `progress` and the result are as in
    `save_hf`."""
    lora = read_lora(adapter, ARGUMENT)
    source = resolve_model(model, "--model") if model else resolve_model(base_of(adapter), f"{adapter / CONFIG} (or name one with --model)")
    hf_config = load_hf_config(source)
    chunks = build_model(hf_config, layout, dtype=weights_dtype(hf_config), init_weights=False, own_linears=True)
    attach_adapters(chunks, hf_config, lora, recompute="none")
    for added in adapters(chunks):
        added.float()  # the file holds A and B in float32; in the model's bfloat16 they would be rounded before the sum is
    run_own_and_agree(layout, lambda: load_hf(chunks, hf_config, source, layout, progress))
    load_adapter(chunks, hf_config, layout, adapter, lora, ARGUMENT)
    return save_hf(chunks, hf_config, layout, out, source, dtype=dtype, progress=progress)
