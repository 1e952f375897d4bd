"""Self-attention whose heads differ between blocks with and without a window, whose keys may be its values, or whose
keys and values may be another block's."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.families.shared.architecture import HfConfig
from megagrpo.policy.attention.head_norms import UnitNorm
from megagrpo.policy.layers.bypass_gradient import detour, leaf_of


def _linear(attention: Any, build: Any, config: TransformerConfig, with_keys: bool) -> Any:
    """Return the linear of queries, or of queries and keys, which `build` makes as Megatron's `linear_qkv`."""
    return build(
        config.hidden_size,
        attention.query_projection_size + (attention.kv_projection_size if with_keys else 0),
        config=config,
        init_method=config.init_method,
        gather_output=False,
        bias=False,
        skip_bias_add=False,
        is_expert=False,
        tp_group=attention.pg_collection.tp,
    )


def _queries_and_keys(attention: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Return query [T, 1, h, d] and key [T, 1, g, d] of `linear_qk`, which has them by group."""
    mixed, _ = attention.linear_qk(hidden_states)
    d = attention.hidden_size_per_attention_head
    mixed = mixed.unflatten(-1, (attention.num_query_groups_per_partition, -1))
    query, key = mixed.split([mixed.shape[-1] - d, d], dim=-1)
    return query.reshape(*query.shape[:2], -1, d), key


@functools.cache
def heads_by_block(base: Any, hf_config: HfConfig) -> Any:
    """Return a subclass of `base`, Megatron's self-attention, with the heads of its decoder block.

    Each head's values are divided by their root mean square. Where keys are the values, `linear_qk` yields queries and
    keys, and there is no `linear_qkv`. Where another block lends keys and values, `linear_q` yields queries only.
    """

    class HeadsByBlock(base):
        k_layernorm: Any  # None where keys are another block's

        def __init__(self, config: TransformerConfig, submodules: Any, layer_number: int, *args: Any, **kwargs: Any):
            block = (layer_number - 1) // hf_config.layers_per_block
            own, self.block, self.lender = hf_config.in_block(block), block, hf_config.lender(block)
            self.lends = block in map(hf_config.lender, range(block + 1, hf_config.num_layers))
            config = copy.copy(config)
            config.kv_channels, config.num_query_groups = own.head_dim, own.num_kv_heads
            super().__init__(config, submodules, layer_number, *args, **kwargs)
            self.value_norm = UnitNorm(hf_config.norm_eps)
            name = own.query_linear
            if name != "linear_qkv":
                del self.linear_qkv
                setattr(self, name, _linear(self, submodules.linear_qkv, config, own.keys_as_values))
            if self.lender is not None:
                self.k_layernorm = None

        def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any) -> Any:
            """Return (output [T, 1, H], bias)."""
            self.packed = packed_seq_params
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

        def get_query_key_value_tensors(
            self, hidden_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor, Tensor]:
            """Return query [T, 1, h, d], key and value [T, 1, g, d] of this rank's heads."""
            if self.lender is not None:
                queries, _ = self.linear_q(hidden_states)
                query = queries.unflatten(-1, (-1, self.hidden_size_per_attention_head))
                return self.q_layernorm(query), *borrowed(self.packed, self.lender)
            query, key, value = self._own(hidden_states, *args, **kwargs)
            if not self.lends:
                return query, key, value
            return query, *lend(self.packed, self.block, (key, value), self.config.recompute_granularity == "full")

        def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
            """Name the norm inside Transformer Engine's linear as the norm of layers without it is named."""
            state, own = super().sharded_state_dict(prefix, *args, **kwargs), hf_config.in_block(self.block)
            names = {f"{prefix}{own.query_linear}.layer_norm_": f"{prefix}linear_qkv.layer_norm_"}
            apply_prefix_mapping(state, names)
            return state

        def _own(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
            if hasattr(self, "linear_qkv"):
                query, key, value = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
                return query, key, self.value_norm.normalise(value)
            query, key = _queries_and_keys(self, hidden_states)
            return self.q_layernorm(query), self.k_layernorm(key), self.value_norm.normalise(key)

    return HeadsByBlock


Pair = tuple[Tensor, Tensor]  # keys [T, 1, g, d], normed and not rotated, and values


def lend(packed: PackedSeqParams, block: int, pair: Pair, recomputes: bool) -> Pair:
    """Return keys and values of `block`, whose gradients include those of the blocks that `borrowed` them. With
    `recomputes` a pass with gradients may repeat the block inside an activation checkpoint; the first pass counts."""
    lent: dict[int, Pair] = vars(packed).setdefault("lent", {})
    if block not in lent or not (recomputes and torch.is_grad_enabled()):
        lent[block] = leaf_of(pair[0]), leaf_of(pair[1])
    key, value = (detour(own, own, leaf) for own, leaf in zip(pair, lent[block], strict=True))
    return key, value


def borrowed(packed: PackedSeqParams, block: int) -> Pair:
    """Return the keys and values that `block` has lent."""
    lent: dict[int, Pair] = vars(packed)["lent"]
    return lent[block]
