"""A head with one number per token, for values and rewards, in any tensor-parallel layout."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megagrpo.platform import device
from megagrpo.platform.parallel.layout import Layout

SCALAR_HEAD = "scalar_head.weight"
"""Name of the head's weight in its model chunk, the last one."""
SCORE, SCORE_FILE = "score.weight", "score.safetensors"  # the head in files of transformers, and its file in ours


class ScalarHead(nn.Module):
    """One number per token: hidden [N, H] -> [N] float32. It starts at 0.

    Each tensor-parallel rank multiplies its own H/tp elements, so that the gradients of the hidden states are parts
    that `head_input` sums, as those of a vocabulary's shards are.
    """

    def __init__(self, hidden_size: int, layout: Layout, dtype: torch.dtype):
        super().__init__()
        width = hidden_size // layout.parallel.tp
        self.own = slice(layout.tp_rank * width, (layout.tp_rank + 1) * width)
        self.group = layout.tp_group
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=dtype, device=device.device()))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=1, stride=1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the numbers [N] of hidden states [N, H], the same on all tensor-parallel ranks."""
        parts = hidden[:, self.own].float() @ self.weight[0].float()
        return reduce_from_tensor_model_parallel_region(parts, group=self.group)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's sharded state: the weight [1, H] along its second dimension."""
        groups = dict(tp_group=self.group, dp_cp_group=(metadata or {}).get("dp_cp_group"))
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {"weight": 1}, sharded_offsets, **groups
        )
