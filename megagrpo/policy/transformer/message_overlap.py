"""Messages beside computation: Megatron's settings for `train.overlap` and `parallel.expert_dispatcher`, and what the
machine needs for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megagrpo.config import ParallelSection, RunConfig, TrainSection
from megagrpo.platform import device
from megagrpo.policy.layers.megatron_modules import config_of

DEEP_EP_CLASSES = {"deepep": "Buffer", "hybridep": "HybridEPBuffer"}  # HybridEP is a branch of the package


def overlap_config(dispatcher: str, overlap: Sequence[str]) -> dict[str, Any]:
    """Return the fields of Megatron's configuration. With variable lengths Megatron rejects its default dispatcher,
    `allgather`, even without experts.

    Without `experts` the delayed weight gradients run beside the backward all-to-all of the dispatch; with it, Megatron
    schedules them beside another micro-batch.
    """
    delayed = "weight_gradients" in overlap
    return dict(
        moe_token_dispatcher_type="alltoall" if dispatcher == "alltoall" else "flex",
        moe_flex_dispatcher_backend="deepep" if dispatcher == "alltoall" else dispatcher,
        # Micro-batches of data-parallel ranks differ in length, and HybridEP needs equal ones.
        moe_hybridep_pad_uneven_dispatch_inputs=dispatcher == "hybridep",
        tp_comm_overlap="tp" in overlap,
        moe_shared_expert_overlap="shared_experts" in overlap,
        overlap_moe_expert_parallel_comm="experts" in overlap,
        delay_wgrad_compute=delayed and "experts" in overlap,
        overlap_dispatch_backward_with_experts_wgrad=delayed and "experts" not in overlap,
    )


def prepare_overlap(config: RunConfig, chunks: Sequence[nn.Module]) -> None:
    """Prepare the bare chunks for `train.overlap`. With `tp` allocate Transformer Engine's communication buffers, for
    micro-batches of `config.micro_batch_align` tokens, which all have then. Collective over tensor-parallel ranks."""
    if "experts" in config.train.overlap:
        from megagrpo.policy.transformer.expert_overlap import plan_chunks  # opens files that other runs do not need

        plan_chunks(chunks)
    if "tp" not in config.train.overlap:
        return
    from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

    initialize_ub(
        [config.micro_batch_align // config.parallel.cp, config_of(chunks[0]).hidden_size],
        config.parallel.tp,
        quantization_modes=[UserBufferQuantizationMode.NONE],
        dtype=torch.bfloat16,
        bootstrap_backend="nccl",
    )


def check_overlap(train: TrainSection, parallel: ParallelSection, dtype: torch.dtype) -> None:
    """Raise ValueError, with key and fix, for an overlap or a dispatcher that this machine cannot run."""
    for name in ("tp", "weight_gradients"):
        if name in train.overlap and not device.has_transformer_engine():
            raise ValueError(f"train.overlap: {name} needs Transformer Engine, which is not here; leave {name} out")
    for name in ("tp", "experts"):
        if name in train.overlap and dtype != torch.bfloat16:
            raise ValueError(f"train.overlap: {name} needs bf16; leave {name} out, or set model.precision to bf16")
    dispatcher = parallel.expert_dispatcher
    if dispatcher == "alltoall":
        return
    key = f"parallel.expert_dispatcher: {dispatcher}"
    if not device.has_gpu():
        raise ValueError(f"{key} needs GPUs, and this machine has none; choose alltoall")
    if dtype != torch.bfloat16:
        raise ValueError(f"{key} sends bf16 only; choose alltoall, or set model.precision to bf16")
    if not _deep_ep_has(DEEP_EP_CLASSES[dispatcher]):
        what = "the branch hybrid-ep of " if dispatcher == "hybridep" else ""
        raise ValueError(f"{key} needs {what}the package deep_ep, which is not installed; install it, or use alltoall")


def _deep_ep_has(name: str) -> bool:
    """Whether the package deep_ep is installed with this class."""
    if importlib.util.find_spec("deep_ep") is None:
        return False
    return hasattr(importlib.import_module("deep_ep"), name)
