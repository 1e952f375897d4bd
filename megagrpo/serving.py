"""vLLM servers on a model: those of a run, and those of commands that only ask it something."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megagrpo.config import RunConfig
from megagrpo.parallel import device
from megagrpo.rollout.launcher import LORA_RANKS, Launcher, ServerOptions

ADAPTER = "adapter"  # the name under which a server knows a LoRA adapter


def name_of(dtype: torch.dtype) -> str:
    """As vLLM and Hugging Face call it: `float32`."""
    return str(dtype).removeprefix("torch.")


def make_launcher(config: RunConfig, model_folder: Path, log_folder: Path, dtype: str, adapter: Path | None = None) -> Launcher:
    """The servers that `rollout` describes, on `model_folder`, not yet started; they log into `log_folder`. With the PEFT folder `adapter`
    they also serve the model ADAPTER. ValueError when that is no adapter."""
    r = config.rollout
    options = ServerOptions(
        model=str(model_folder.resolve()),
        dtype=dtype,
        max_model_len=config.longest_sequence,
        tp=r.tp,
        max_num_seqs=r.max_num_seqs,
        kv_cache_gb=r.kv_cache_gb,
        gpu_memory_utilization=r.gpu_memory_utilization,
        enforce_eager=r.enforce_eager,
        deterministic=config.run.deterministic,
        lora_rank=config.lora.rank if config.lora.syncs_adapters else 0,
        extra_args=(*r.extra_args, *adapter_arguments(adapter)),
    )
    return Launcher(
        options, log_folder, num_servers=r.servers, port=r.port, devices=device.visible_gpus(), startup_timeout=r.startup_timeout
    )


def adapter_arguments(adapter: Path | None) -> list[str]:
    """What has vLLM serve a LoRA adapter that PEFT saved; nothing for None. ValueError for a folder that is none."""
    if adapter is None:
        return []
    try:
        rank = int(json.loads((adapter / "adapter_config.json").read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--adapter: {adapter} holds no adapter_config.json of PEFT with a rank `r`: {error}") from error
    fits = next((known for known in LORA_RANKS if known >= rank), rank)
    return ["--enable-lora", "--max-lora-rank", str(fits), "--lora-modules", f"{ADAPTER}={adapter.resolve()}"]
