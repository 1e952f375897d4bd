"""Group-limited expert routing (DeepSeek-V2, arXiv 2405.04434, section 2.1.3, and V3, arXiv 2412.19437)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BestGroups:
    """Selects experts from the best groups of experts, through the hook that Megatron's router has for replayed routes.

    Experts form `count` groups of neighbours. A group's score is the sum of its `best` highest scores. The `taken`
    highest-scoring groups stay eligible. Megatron always sums as many scores as a token has experts in a group.
    """

    count: int
    taken: int
    best: int

    def get_replay_topk(self, scores: Tensor, topk: int, *_: object) -> tuple[Tensor, Tensor]:
        """Return (scores, indices) [tokens, topk] of the selected experts, from scores [tokens, experts]."""
        grouped = scores.unflatten(-1, (self.count, -1))
        taken = grouped.topk(self.best, dim=-1).values.sum(-1).topk(self.taken, dim=-1, sorted=False).indices
        hidden = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, taken, False)
        return grouped.masked_fill(hidden[..., None], float("-inf")).flatten(-2).topk(topk, dim=-1)
