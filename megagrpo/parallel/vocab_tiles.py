"""Walking over a vocabulary-sharded LM head one tile of logits at a time: what the log-probs and the exact KL share.

A tensor-parallel rank holds rows [V/tp, H] of the head. A tile is the logits of all N tokens with `chunk` of them, [N, chunk]. Tiles are
folded into running sums in the forward pass (the online softmax of Milakov and Gimelshein 2018, arXiv 1805.02867) and computed again in the
backward pass, so the [N, V/tp] logits never exist. Rows of the padded vocabulary are never multiplied: probability and gradient 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

LOWEST = -1e30  # below every logit; minus infinity would make 0 * inf of a rank that holds no row


@dataclass(frozen=True)
class VocabShard:
    """This rank's share of the vocabulary: ids first_row .. first_row + num_rows of `group`'s rows, walked over `chunk` at a time."""

    group: dist.ProcessGroup | None
    first_row: int
    num_rows: int  # without padding
    chunk: int

    @classmethod
    def of(cls, weight: Tensor, group: dist.ProcessGroup | None, vocab_size: int | None, chunk: int) -> VocabShard:
        """The shard whose head is `weight` [V/tp, H]; ids at or above `vocab_size` are padding."""
        height = weight.shape[0]
        first_row = dist.get_rank(group) * height if group is not None else 0
        num_rows = height if vocab_size is None else max(0, min(height, vocab_size - first_row))
        return cls(group, first_row, num_rows, min(chunk, height))

    def tiles(self) -> Iterator[slice]:
        """Consecutive rows of the shard."""
        for start in range(0, self.num_rows, self.chunk):
            yield slice(start, min(start + self.chunk, self.num_rows))

    def pick(self, values: Tensor, labels: Tensor, tile: slice) -> Tensor:
        """[N]: the value of each token's label in values [N, rows] of the tile, 0 where the tile does not hold the label."""
        column, held = self._place(labels, tile)
        return torch.where(held, values.gather(1, column), 0.0)[:, 0]

    def add_at_labels(self, values: Tensor, labels: Tensor, tile: slice, added: Tensor) -> None:
        """Add `added` [N] to the entry of each token's label in values [N, rows] of the tile, where the tile holds it."""
        column, held = self._place(labels, tile)
        values.scatter_add_(1, column, torch.where(held, added[:, None], 0.0))

    def _place(self, labels: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
        """(column [N, 1] of each label in the tile, whether it is there [N, 1]); a label that is not points at column 0."""
        column = labels[:, None] - (self.first_row + tile.start)
        held = (column >= 0) & (column < tile.stop - tile.start)
        return torch.where(held, column, 0), held

    def sum(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Each row [N] summed over the group."""
        stacked = torch.stack(rows)
        self.all_reduce(stacked, dist.ReduceOp.SUM)
        return stacked.unbind()

    def all_reduce(self, values: Tensor, op: dist.ReduceOp) -> None:
        """Combine `values` over the group, in place."""
        if self.group is not None and dist.get_world_size(self.group) > 1 and values.numel():
            dist.all_reduce(values, op=op, group=self.group)


class TileMemory:
    """Room for one tile [N, rows] of float32 (float64 for float64 inputs), reused by every tile."""

    def __init__(self, hidden: Tensor, shard: VocabShard):
        self._num_tokens = hidden.shape[0]
        self._flat = hidden.new_empty(self._num_tokens * shard.chunk, dtype=wide(hidden.dtype))

    def __call__(self, tile: slice) -> Tensor:
        rows = tile.stop - tile.start
        return self._flat[: self._num_tokens * rows].view(self._num_tokens, rows)


def tile_logits(hidden: Tensor, weight: Tensor, temperature: float, out: Tensor) -> Tensor:
    """hidden [N, H] weight^T [H, rows] / temperature, in `out` [N, rows]."""
    if out.dtype == hidden.dtype:
        torch.mm(hidden, weight.t(), out=out)
    else:
        out.copy_(hidden @ weight.t())
    return out if temperature == 1.0 else out.div_(temperature)


class RunningSoftmax:
    """What is known of each token's softmax after some tiles; all [N]. With z the logits seen so far and e = exp(z - maximum):
    total = sum e, moment = sum e (z - maximum), cross = sum e d for a row d given with each tile."""

    def __init__(self, hidden: Tensor):
        self.maximum = hidden.new_full(hidden.shape[:1], LOWEST, dtype=wide(hidden.dtype))
        self.total, self.moment, self.cross = (torch.zeros_like(self.maximum) for _ in range(3))

    def add(self, logits: Tensor, scratch: Tensor, difference: Tensor | None = None) -> None:
        """Fold in a tile of logits; `difference` is its part of d. All three tensors are overwritten."""
        self._rise_to(torch.maximum(self.maximum, logits.amax(dim=-1)))
        exponentials = torch.exp(logits.sub_(self.maximum[:, None]), out=scratch)
        self.total += exponentials.sum(dim=-1)
        self.moment += logits.mul_(exponentials).sum(dim=-1)
        if difference is not None:
            self.cross += difference.mul_(exponentials).sum(dim=-1)

    def combine(self, shard: VocabShard) -> None:
        """Make the sums those of the whole vocabulary."""
        highest = self.maximum.clone()
        shard.all_reduce(highest, dist.ReduceOp.MAX)
        self._rise_to(highest)
        self.total, self.moment, self.cross = shard.sum(self.total, self.moment, self.cross)

    def _rise_to(self, maximum: Tensor) -> None:
        rise = self.maximum - maximum
        factor = rise.exp()
        self.moment = (self.moment + self.total * rise) * factor
        self.total, self.cross = self.total * factor, self.cross * factor
        self.maximum = maximum

    @property
    def log_normaliser(self) -> Tensor:
        """log sum exp of the logits."""
        return self.maximum + self.total.log()

    def logprobs(self, logits: Tensor) -> Tensor:
        """log p [N] of entries with these logits [N]."""
        return logits - self.maximum - self.total.log()

    @property
    def entropy(self) -> Tensor:
        """-sum p log p."""
        return self.total.log() - self.moment / self.total


class HeadGradients:
    """Gradients of hidden [N, H] and weight [V/tp, H] from those of the logits, tile by tile; None for one that is not needed.

    Each tile owns its rows of the weight's gradient. That of hidden is a sum over tiles, in float32 at least.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, needed: tuple[bool, bool]):
        self._hidden, self._weight = hidden, weight
        self._grad_hidden = torch.zeros_like(hidden, dtype=wide(hidden.dtype)) if needed[0] else None
        self._grad_weight = torch.zeros_like(weight) if needed[1] else None

    def add(self, tile: slice, grad_logits: Tensor) -> None:
        """grad_logits [N, rows] of logits before the temperature."""
        grad_logits = grad_logits.to(self._hidden.dtype)
        if self._grad_weight is not None:
            torch.mm(grad_logits.t(), self._hidden, out=self._grad_weight[tile])
        if self._grad_hidden is None:
            return
        if self._grad_hidden.dtype == self._hidden.dtype:
            self._grad_hidden.addmm_(grad_logits, self._weight[tile])
        else:
            self._grad_hidden += grad_logits @ self._weight[tile]

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        hidden = None if self._grad_hidden is None else self._grad_hidden.to(self._hidden.dtype)
        return hidden, self._grad_weight


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits and sums over them: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)
