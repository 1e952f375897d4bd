"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) as a Megatron module with our rotary embedding.

Megatron's `MLASelfAttention` restarts positions at 0 for each packed sequence and always normalises queries. Without
Transformer Engine it shards the down projections too, so the rotated keys' gradient misses other ranks' heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules, MultiLatentAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megagrpo.policy.attention.packed import Rotary, TorchAttention
from megagrpo.policy.layers.elementwise import rotate

LATENT_EPS = 1e-6  # epsilon of the latents' norms; like transformers it ignores rms_norm_eps


class WholeLinear(nn.Module):
    """x W^T with the whole W [out, in] replicated on every tensor-parallel rank."""

    def __init__(self, config: MLATransformerConfig, in_size: int, out_size: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(
            torch.empty(out_size, in_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        if config.perform_initialization:
            config.init_method(self.weight)
        # finalize_model_grads sums this gradient over the tensor-parallel ranks, each of which sees a part of the
        # sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T [..., out] of x [..., in]."""
        return F.linear(x, self.weight)


class LatentAttention(MultiLatentAttention):
    """Causal self-attention: keys, values and, if a query rank is set, queries are projected from low-rank latents.

    Every tensor-parallel rank computes the latents of its tokens; the heads are sharded over the ranks.
    `build._set_rotary` sets `rotary`.
    """

    rotary: Rotary | None = None

    def __init__(
        self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules, layer_number: int, **options: Any
    ):
        super().__init__(config, submodules, layer_number, attention_type="self", **options)
        self.rotary_pos_emb = None  # Megatron's own rotary embedding is unused
        # Megatron's own recomputation of the up projections is part of a method that this class replaces.
        self.recompute_up_proj, self._recomputes_up = False, self.recompute_up_proj
        hidden, heads = config.hidden_size, config.num_attention_heads
        norm = dict(config=config, eps=LATENT_EPS)
        if config.q_lora_rank is None:
            self.linear_q_proj = self._over_heads(submodules.linear_q_proj, hidden, heads * self.q_head_dim)
        else:
            self.linear_q_down_proj = WholeLinear(config, hidden, config.q_lora_rank)
            self.q_layernorm = submodules.q_layernorm(hidden_size=config.q_lora_rank, **norm)
            self.linear_q_up_proj = self._over_heads(
                submodules.linear_q_up_proj, config.q_lora_rank, heads * self.q_head_dim
            )
        self.linear_kv_down_proj = WholeLinear(config, hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = submodules.kv_layernorm(hidden_size=config.kv_lora_rank, **norm)
        keys_and_values = heads * (config.qk_head_dim + config.v_head_dim)
        self.linear_kv_up_proj = self._over_heads(submodules.linear_kv_up_proj, config.kv_lora_rank, keys_and_values)

    def _over_heads(self, linear: type, in_size: int, out_size: int) -> nn.Module:
        options = dict(
            gather_output=False, bias=False, skip_bias_add=False, is_expert=False, tp_group=self.pg_collection.tp
        )
        return linear(in_size, out_size, config=self.config, init_method=self.config.init_method, **options)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: object | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return (query, key, value, latent of the queries, latent of keys and values) of this rank's heads h, in the
        dtype of the hidden states.

        Query and key are [T, h, nope + rope], value [T, h, v]; without a pack they are [L, S, h, ...]. Hidden states
        are [T, 1, H] or [L, S, H], under sequence parallelism this rank's part of the tokens.
        """
        c = self.config
        assert c.sequence_parallel or c.tensor_model_parallel_size == 1, (
            "the gradient of what is whole on every rank would be of its heads"
        )
        if packed_seq_params is not None:
            hidden_states = hidden_states.flatten(0, 1)
        q_latent = hidden_states if c.q_lora_rank is None else self.q_layernorm(self.linear_q_down_proj(hidden_states))
        kv_latent, rotated_key = self.linear_kv_down_proj(hidden_states).split(
            [c.kv_lora_rank, c.qk_pos_emb_head_dim], dim=-1
        )
        kv_latent = self.kv_layernorm(kv_latent)
        inputs = q_latent, kv_latent, rotated_key, packed_seq_params
        if self._recomputes_up:
            return *checkpoint(self._heads, *inputs, use_reentrant=False, preserve_rng_state=False), q_latent, kv_latent
        return *self._heads(*inputs), q_latent, kv_latent

    def _heads(
        self, q_latent: Tensor, kv_latent: Tensor, rotated_key: Tensor, packed: PackedSeqParams | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of this rank's heads, projected from the latents and rotated."""
        c = self.config
        query, _ = (self.linear_q_proj if c.q_lora_rank is None else self.linear_q_up_proj)(q_latent)
        keys_and_values, _ = self.linear_kv_up_proj(kv_latent)
        # All heads share this key: backward sums its gradient over the ranks, as the linears over heads do for the
        # latents.
        rotated_key = gather_from_sequence_parallel_region(rotated_key, group=self.pg_collection.tp)

        query, keys_and_values = (
            t.unflatten(-1, (self.num_attention_heads_per_partition, -1)) for t in (query, keys_and_values)
        )
        query, rotated_query = query.split([c.qk_head_dim, c.qk_pos_emb_head_dim], dim=-1)
        key, value = keys_and_values.split([c.qk_head_dim, c.v_head_dim], dim=-1)
        cos, sin = self._rotation(query, packed)
        rotated_query = rotate(rotated_query, cos, sin, interleaved=True)
        rotated_key = rotate(rotated_key[..., None, :], cos, sin, interleaved=True).expand_as(rotated_query)
        return torch.cat([query, rotated_query], -1), torch.cat([key, rotated_key], -1), value

    def _rotation(self, query: Tensor, packed: PackedSeqParams | None) -> tuple[Tensor, Tensor]:
        assert self.rotary is not None, "build._set_rotary has not run"
        if packed is None:
            return self.rotary.cos_sin(torch.arange(len(query), device=query.device)[:, None, None], query.dtype)
        return self.rotary.pack_cos_sin(packed, query.dtype)

    def _run_core_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Run core attention. Values narrower than queries are padded for Transformer Engine, not `TorchAttention`."""
        if isinstance(self.core_attention, TorchAttention):
            return self.core_attention(query, key, value, attention_mask, **options)
        return super()._run_core_attention(query, key, value, attention_mask, **options)
