"""Experts from the best groups of experts (DeepSeek-V2, arXiv 2405.04434, section 2.1.3, and V3, arXiv 2412.19437)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BestGroups:
    """Which experts a token goes to, told where Megatron's router lets routes be replayed: the best of the `taken` out of `count` groups of
    neighbours whose `best` highest scores add up to most. Megatron itself always adds up as many scores as a token has experts in a group.
    """

    count: int
    taken: int
    best: int

    def get_replay_topk(self, scores: Tensor, topk: int, *_) -> tuple[Tensor, Tensor]:
        """(scores, indices) [tokens, topk] of the experts to go to, from scores [tokens, experts]."""
        grouped = scores.unflatten(-1, (self.count, -1))
        taken = grouped.topk(self.best, dim=-1).values.sum(-1).topk(self.taken, dim=-1, sorted=False).indices
        hidden = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, taken, False)
        return grouped.masked_fill(hidden[..., None], float("-inf")).flatten(-2).topk(topk, dim=-1)
