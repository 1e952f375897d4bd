"""A trained vision tower (`model.freeze_vision_tower: false`): a module of the chunk that embeds tokens, so that
Megatron's gradient buffers, optimizer and checkpoints hold it like every weight that tensor parallelism replicates."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch.utils.checkpoint import checkpoint

from megagrpo.families.hf_config import HfConfig
from megagrpo.families.shared.vision import TOWER
from megagrpo.policy.images.image_inputs import build_tower
from megagrpo.policy.transformer.transformer_config import ModelOptions


def train_tower(hf_config: HfConfig) -> HfConfig:
    """Return the architecture with a trained tower; unchanged without a tower."""
    if hf_config.vision is None:
        return hf_config
    with torch.device("meta"):
        names = build_tower(hf_config, torch.float32).state_dict()
    return replace(hf_config, vision=replace(hf_config.vision, trained=tuple(names)))


def attach_tower(chunk: HybridModel, hf_config: HfConfig, options: ModelOptions) -> None:
    """Give the chunk the tower, without weights, if it is trained and the chunk embeds tokens."""
    if hf_config.vision is None or not hf_config.vision.trained or not chunk.pre_process:
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    tower: Any = build_tower(hf_config, options.dtype)
    if options.recompute == "full":
        for block in (module for module in tower.modules() if isinstance(module, GradientCheckpointingLayer)):
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        tower.train()  # transformers recomputes in training mode only; the towers have no dropout
    for parameter in tower.parameters():
        # A rank sees the gradients of its own tokens: finalize_model_grads sums them over the tensor-parallel ranks.
        parameter.requires_grad_().sequence_parallel = options.sequence_parallel
    chunk.add_module(TOWER, tower)
