"""Kernels in vLLM for CPU: patches for rotary embeddings, routers, latent attention and the mask of images."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum


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


def attend_in_float32() -> None:
    """Select the kernels of latent attention that take float32 for a float32 model, on CPUs with AMX too.

    vLLM for CPU (seen in 0.32) selects its AMX kernels by the CPU alone. They take bf16 only, and the server ends with
    "expect weight to be bfloat16, float16, int8, fp8_e4m3 or uint8". Remove this patch when DeepSeek-V3 in float32
    starts on such a CPU without it; the tests check that.
    """
    original = CpuPlatform.check_and_update_config.__func__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        model = vllm_config.model_config
        if model is not None and model.use_mla and model.dtype == torch.float32:
            vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA
        original(cls, vllm_config)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def see_whole_images() -> None:
    """Let the tokens of an image see each other in both directions (Gemma 3), as on GPUs.

    vLLM's attention for CPU (seen in 0.32) ignores `mm_req_doc_ranges`: without an error it is causal there. Its kernel
    has a flag for each request. So the part of a request that is an image becomes a request of its own, without a
    causal mask, that ends with the image. Remove this patch when log-probs of Gemma 3 with images are right without it;
    the tests check that.
    """
    if hasattr(CPUAttentionMetadataBuilder.build, "__wrapped__"):
        return
    original = CPUAttentionMetadataBuilder.build

    @functools.wraps(original)
    def build(
        self: Any, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        return original(self, common_prefix_len, split_at_images(common_attn_metadata), fast_build)

    CPUAttentionMetadataBuilder.build = build


def split_at_images(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Return a batch in which each image whose tokens are queries is a request without a causal mask."""
    images, starts, lengths = (
        common.mm_req_doc_ranges or {},
        common.query_start_loc_cpu.tolist(),
        common.seq_lens.tolist(),
    )
    parts = []  # (request, index of the first query in the batch, number of keys, whether the mask is causal)
    for request, length in enumerate(lengths[: common.num_reqs]):
        first, stop = starts[request], starts[request + 1]
        before = at = length - (stop - first)
        for begin, last in sorted(images.get(request, ())):
            if last < at or begin >= length:
                continue
            assert last < length, "a chunk of a prompt ends inside an image"
            if begin > at:
                parts.append((request, first + at - before, begin, True))
                at = begin
            parts.append((request, first + at - before, last + 1, False))
            at = last + 1
        if at < length:
            parts.append((request, first + at - before, length, True))
    if all(causal for *_, causal in parts):
        return common
    requests, queries, keys, causal = zip(*parts, strict=True)
    borders = torch.tensor([*queries, starts[common.num_reqs]], dtype=torch.int32)
    return replace(
        common,
        num_reqs=len(parts),
        query_start_loc=borders,
        query_start_loc_cpu=borders,
        seq_lens=torch.tensor(keys, dtype=common.seq_lens.dtype),
        block_table_tensor=common.block_table_tensor[list(requests)],
        causal=torch.tensor(causal, dtype=torch.int32),
    )
