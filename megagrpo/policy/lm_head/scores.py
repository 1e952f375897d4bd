"""Scores of a reward model: the product of hidden states with one row of the LM head, in any layout."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from megagrpo.policy.layers.embedding import rows_of


def scores(states: Tensor, weight: Tensor, row: int, group: dist.ProcessGroup, into_main_grad: bool) -> Tensor:
    """Return [N] float32: states [N, H] times the row of the head, whose rows [V/tp, H] of this rank are `weight`.

    The rank that has the row computes the product, and all ranks of `group` get it. `into_main_grad` adds the row's
    gradient to the weight's float32 sum.
    """
    place = row - dist.get_rank(group) * weight.shape[0]
    missing = torch.tensor([[not 0 <= place < weight.shape[0]]], device=weight.device)
    index = torch.tensor([[place]], device=weight.device).masked_fill(missing, 0)
    vector = rows_of(weight, index, missing[..., None], into_main_grad)[0, 0]
    return reduce_from_tensor_model_parallel_region(states.float() @ vector.float(), group=group)
