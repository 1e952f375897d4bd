"""The tokens a sampler with top-k, top-p or min-p can choose, from vocabulary-sharded logits without gathering them.

vLLM reports log-probs of the distribution it sampled from: the softmax over the tokens that these rules keep. The
trainer drops the other tokens from its own logits to compute the same. The choice of tokens is a constant to the
gradient. Every rule keeps the logits at or above some value, so one number per token describes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.policy.lm_head.vocab_shard import LOWEST, VocabShard, column_blocks
from megagrpo.train_types import moved
from megagrpo.types import Truncation


@dataclass(frozen=True)
class TruncationsOfTokens:
    """Rules of each of N tokens. A value that keeps all tokens is as in `Truncation`."""

    top_p: Tensor  # [N] float64
    top_k: Tensor  # [N] int64
    min_p: Tensor  # [N] float64
    largest: Truncation  # the strictest top_p and min_p, and the largest top_k, of all tokens: on the host

    @classmethod
    def of(cls, rules: Sequence[Truncation], owners: Tensor) -> TruncationsOfTokens:
        """Return the rules of tokens with the numbers `owners` [N] of their rules."""
        columns = [torch.tensor([getattr(rule, name) for rule in rules]) for name in ("top_p", "top_k", "min_p")]
        top_p, top_k, min_p = (moved(column, owners.device)[owners] for column in columns)
        largest = Truncation(*(edge(c.tolist()) for edge, c in zip((min, max, max), columns, strict=True)))
        return cls(top_p.double(), top_k, min_p.double(), largest)

    def of_rows(self, rows: slice) -> TruncationsOfTokens:
        """Return the rules of the tokens `rows`."""
        return TruncationsOfTokens(self.top_p[rows], self.top_k[rows], self.min_p[rows], self.largest)


def lowest_kept(logits: Tensor, shard: VocabShard, truncation: Truncation | TruncationsOfTokens) -> Tensor:
    """Return [n]: each token's smallest kept logit, from this rank's logits [n, v] after the temperature; same dtype.

    Rules and order are vLLM's. min-p keeps tokens with at least that share of the top probability. Then top-k keeps the
    k largest and ties with the last. Of the rest, renormalised to 1, top-p keeps the largest that sum to p.
    """
    maximum = shard.maximum(logits)
    lowest = torch.full_like(maximum, LOWEST)
    if isinstance(truncation, TruncationsOfTokens):
        return _lowest_of_each(logits, shard, truncation, maximum, lowest)
    if truncation.min_p:
        lowest = maximum + math.log(truncation.min_p)
    if truncation.top_k:
        lowest = torch.maximum(lowest, shard.topk(logits, truncation.top_k)[0][:, -1])
    if truncation.top_p < 1:
        lowest = torch.maximum(lowest, _nucleus(logits, shard, truncation.top_p, maximum, lowest))
    return lowest


def _lowest_of_each(
    logits: Tensor, shard: VocabShard, rules: TruncationsOfTokens, maximum: Tensor, lowest: Tensor
) -> Tensor:
    """Return [n] like `lowest_kept`, for tokens with rules of their own. Rules that no token has cost nothing."""
    if rules.largest.min_p:  # the logarithm of 0 is below every logit
        lowest = torch.maximum(lowest, maximum + rules.min_p.log().to(maximum.dtype))
    if most := rules.largest.top_k:
        last = shard.topk(logits, most)[0].gather(1, (rules.top_k - 1).clamp(min=0)[:, None])[:, 0]
        lowest = torch.where(rules.top_k > 0, torch.maximum(lowest, last), lowest)
    if rules.largest.top_p < 1:
        nucleus = _nucleus(logits, shard, rules.top_p.to(maximum.dtype), maximum, lowest)
        lowest = torch.where(rules.top_p < 1, torch.maximum(lowest, nucleus), lowest)
    return lowest


def drop_below(logits: Tensor, labels: Tensor, shard: VocabShard, lowest: Tensor) -> None:
    """Give logits [n, v] below `lowest` [n] probability 0, in place, except the label's.

    The label was sampled, but rounding differences between trainer and engine may place it outside the kept set.
    """
    sampled = shard.gather_at_labels(logits, labels)
    for columns in column_blocks(logits):
        part = logits[:, columns]
        part.masked_fill_(part < lowest[:, None], LOWEST)
    shard.put_at_labels(logits, labels, sampled)


def _nucleus(logits: Tensor, shard: VocabShard, p: float | Tensor, maximum: Tensor, lowest: Tensor) -> Tensor:
    """Return [n]: the smallest logit t >= `lowest` such that the larger logits hold less than p of the probability. `p`
    is one number or [n].

    A bisection over the floating-point numbers that exp(logit - maximum) can take finds it. They lie in [0, 1], where
    floats are ordered as the integers with the same bits. The result is exact after as many rounds as there are bits.
    Each round sums once over the logits and all-reduces n numbers.
    """
    weights = (logits - maximum[:, None]).exp_().masked_fill_(logits < lowest[:, None], 0.0)
    as_integers = torch.int64 if weights.dtype == torch.float64 else torch.int32
    high = torch.ones_like(maximum).view(as_integers)
    low = torch.zeros_like(high)  # the weights above `low` sum to p or more, those above `high` to less
    enough = p * _sum_above(weights, low.view(weights.dtype), shard)
    for _ in range(int(torch.ones((), dtype=weights.dtype).view(as_integers)).bit_length()):  # on the host
        middle = low + (high - low) // 2
        less = _sum_above(weights, middle.view(weights.dtype), shard) < enough
        low, high = torch.where(less, low, middle), torch.where(less, middle, high)
    eligible = torch.where(weights >= high.view(weights.dtype)[:, None], logits, math.inf)
    smallest = eligible.amin(dim=-1) if shard.num_rows else torch.full_like(maximum, math.inf)
    shard.all_reduce(smallest, dist.ReduceOp.MIN)
    return smallest


def _sum_above(weights: Tensor, bound: Tensor, shard: VocabShard) -> Tensor:
    """Return [n]: the sum over all ranks of the weights [n, v] above `bound` [n]."""
    total = torch.zeros_like(bound)
    for columns in column_blocks(weights):
        part = weights[:, columns]
        total += torch.where(part > bound[:, None], part, 0.0).sum(dim=-1)
    shard.all_reduce(total, dist.ReduceOp.SUM)
    return total
