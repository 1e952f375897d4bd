"""Self-attention whose heads differ between blocks with and without a window, and whose keys may be its values."""

from __future__ import annotations

import copy
import functools
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.models.families.architecture import HfConfig
from megagrpo.policy.attention.head_norms import UnitNorm


@functools.cache
def heads_by_block(base: Any, hf_config: HfConfig) -> Any:
    """Return a subclass of `base`, Megatron's self-attention, with the heads of its decoder block.

    Each head's values are divided by their root mean square. Where keys are the values, `linear_qk` yields queries and
    keys, and there is no `linear_qkv`.
    """

    class HeadsByBlock(base):
        def __init__(self, config: TransformerConfig, submodules: Any, layer_number: int, *args: Any, **kwargs: Any):
            own = hf_config.in_block((layer_number - 1) // hf_config.layers_per_block)
            config = copy.copy(config)
            config.kv_channels, config.num_query_groups = own.head_dim, own.num_kv_heads
            super().__init__(config, submodules, layer_number, *args, **kwargs)
            self.value_norm = UnitNorm(hf_config.norm_eps)
            if own.keys_as_values:
                del self.linear_qkv
                self.linear_qk = submodules.linear_qkv(
                    config.hidden_size,
                    self.query_projection_size + self.kv_projection_size,
                    config=config,
                    init_method=config.init_method,
                    gather_output=False,
                    bias=False,
                    skip_bias_add=False,
                    is_expert=False,
                    tp_group=self.pg_collection.tp,
                )

        def get_query_key_value_tensors(
            self, hidden_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor, Tensor]:
            """Return query [T, 1, h, d], key and value [T, 1, g, d] of this rank's heads."""
            if hasattr(self, "linear_qkv"):
                query, key, value = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
                return query, key, self.value_norm.normalise(value)
            mixed, _ = self.linear_qk(hidden_states)
            d = self.hidden_size_per_attention_head
            mixed = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
            query, key = mixed.split([mixed.shape[-1] - d, d], dim=-1)
            query = query.reshape(*query.shape[:2], -1, d)
            return self.q_layernorm(query), self.k_layernorm(key), self.value_norm.normalise(key)

    return HeadsByBlock
