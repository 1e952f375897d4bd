"""Kernels in vLLM for CPU: patches for rotary embeddings and routers."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


def rotate_all_heads() -> None:
    """Rotate queries [tokens, heads, head_dim] of latent attention without a scaled rotary embedding in plain torch.

    vLLM's kernel for CPU (seen in 0.32) takes the size of the last dimension for all heads, and rotates the first head
    only. Log-probs are then off by up to 1. Remove this patch when the log-probs of DeepSeek-V2-Lite are right without
    it; the tests check that.
    """
    if hasattr(RotaryEmbedding.forward_cpu, "__wrapped__"):
        return
    original = RotaryEmbedding.forward_cpu

    @functools.wraps(original)
    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        rotate = original if query.dim() == 2 else RotaryEmbedding.forward_native
        return rotate(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu


def route_as_one_group() -> None:
    """Choose experts without groups by sigmoid (MiniMax-M2) or with a bias (ERNIE 4.5): all experts are one group.

    vLLM for CPU (seen in 0.32) has plain softmax only where a model has no groups. It drops the bias, or the first
    request ends the server with an AssertionError. Remove this patch when log-probs of MiniMax-M2 and ERNIE 4.5 are
    right without it; the tests check that.
    """
    if hasattr(CPURouter._compute_routing, "__wrapped__"):
        return
    original = CPURouter._compute_routing

    @functools.wraps(original)
    def compute_routing(self: CPURouter, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        grouped = self.use_grouped_topk or self.custom_routing_function is not None
        biased = self.scoring_func == "softmax" and self.e_score_correction_bias is not None
        if not grouped and (biased or self.scoring_func == "sigmoid"):
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        return original(self, *arguments, **named)

    CPURouter._compute_routing = compute_routing
