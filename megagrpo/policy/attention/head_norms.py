"""Norms of queries and keys that differ from one norm per head before the rotation."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


class WideNorm(nn.Module):
    """RMSNorm over the elements of all heads together (OLMo 2, arXiv 2501.00656). A tensor-parallel rank has the
    factors of its own heads, [h * d]; the mean of the squares is over all ranks' heads."""

    def __init__(self, config: TransformerConfig, heads: int, tp_group: Any):
        super().__init__()
        self.eps, self.tp_group = config.layernorm_epsilon, tp_group
        self.size = heads * config.kv_channels * tp_group.size()
        start = torch.ones(heads * config.kv_channels, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(start)
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed x [T, 1, h, d] of this rank's heads, in x's dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum((-2, -1), keepdim=True)
        # Every rank's output depends on the sum, so its gradient is summed over the ranks too.
        squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
        squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        return (wide * torch.rsqrt(squares / self.size + self.eps)).to(x.dtype) * self.weight.view(x.shape[-2:])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the factors, sharded over tensor-parallel ranks by head."""
        groups = dict(tp_group=self.tp_group, dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"])
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets, **groups
        )


@functools.cache
def wide_normed(base: Any) -> Any:
    """Return a subclass of `base`, Megatron's self-attention, with a `WideNorm` of queries and one of keys."""

    class WideNormed(base):
        def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
            super().__init__(config, *args, **kwargs)
            groups = self.pg_collection.tp
            self.q_layernorm = WideNorm(config, self.num_attention_heads_per_partition, groups)
            self.k_layernorm = WideNorm(config, self.num_query_groups_per_partition, groups)

    return WideNormed


class UnitNorm:
    """RMSNorm of each head without factors, for `Rotary.with_norms` (Llama 4)."""

    def __init__(self, eps: float):
        self.eps = eps

    def normalise(self, x: Tensor) -> Tensor:
        """Return the normed x [T, heads, d], in x's dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@functools.cache
def late(norm: type[nn.Module]) -> Any:
    """Return a subclass of `norm` that passes its input on. Core attention calls `normalise` after the rotation."""

    class Late(norm):  # type: ignore[misc,valid-type]
        def forward(self, x: Tensor) -> Tensor:
            """Return x."""
            return x

        def normalise(self, x: Tensor) -> Tensor:
            """Return the normed x [T, heads, d]."""
            normed: Tensor = super().forward(x)
            return normed

    return Late
