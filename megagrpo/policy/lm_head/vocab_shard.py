"""A vocabulary-sharded LM head, one chunk of tokens at a time; shared by the log-probs and the exact KL.

A tensor-parallel rank holds rows [V/tp, H] of the head, v of which belong to a token. The others are padding and are
never multiplied, so their probability and gradient are 0. The logits of a chunk of n tokens are [n, v] in float32 and
overwrite the previous chunk's. Elementwise operations on them run by blocks of columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.platform import device

LOWEST = -1e30  # below every logit; with minus infinity a rank without rows would compute 0 * inf


@dataclass(frozen=True)
class VocabShard:
    """This rank's shard of the vocabulary: ids first_row .. first_row + num_rows (exclusive)."""

    group: dist.ProcessGroup | None
    first_row: int
    num_rows: int  # v, without padding

    @classmethod
    def of(cls, weight: Tensor, group: dist.ProcessGroup | None, vocab_size: int | None) -> VocabShard:
        """The shard whose head is `weight` [V/tp, H]; ids at or above `vocab_size` are padding."""
        height = weight.shape[0]
        first_row = dist.get_rank(group) * height if group is not None else 0
        return cls(group, first_row, height if vocab_size is None else max(0, min(height, vocab_size - first_row)))

    def full_vocab_size(self, weight: Tensor, vocab_size: int | None) -> int:
        """Return the number of tokens in the whole vocabulary; the arguments are those of `of`."""
        num_ranks = 1 if self.group is None else dist.get_world_size(self.group)
        return num_ranks * weight.shape[0] if vocab_size is None else vocab_size

    def logits_buffer(self, hidden: Tensor, chunk: int) -> Tensor:
        """Allocate a buffer [min(chunk, N), v] for the logits of at most `chunk` tokens of hidden [N, H]."""
        return hidden.new_empty(min(chunk, hidden.shape[0]), self.num_rows, dtype=sum_dtype(hidden.dtype))

    def logits(
        self, hidden: Tensor, weight: Tensor, temperature: float | Tensor, cap: float | None, buffer: Tensor
    ) -> Tensor:
        """Return the logits [n, v] of hidden [n, H], in the first rows of `buffer`: hidden weight^T, then cap
        tanh(x / cap) with a cap, then / temperature, one number or [n, 1]."""
        out, head = buffer[: hidden.shape[0]], weight[: self.num_rows].t()
        if out.dtype == hidden.dtype:
            torch.mm(hidden, head, out=out)
        else:
            device.write_product(out, hidden, head)
        if cap is not None:
            return out.div_(cap).tanh_().mul_(cap / temperature)
        return out if isinstance(temperature, float) and temperature == 1.0 else out.div_(temperature)

    def gather_at_labels(self, values: Tensor, labels: Tensor) -> Tensor:
        """Return [n]: the value at each token's label in values [n, v], 0 where this rank does not hold the label."""
        return self.gather_columns(values, labels[:, None])[:, 0]

    def gather_columns(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return [n, k]: values [n, v] at each token's ids [n, k], 0 where this rank does not hold an id."""
        if self.num_rows == 0:
            return values.new_zeros(ids.shape)
        column, is_local = self._locate(ids)
        return torch.where(is_local, values.gather(1, column), 0.0)

    def add_at_labels(self, values: Tensor, labels: Tensor, added: Tensor) -> None:
        """Add `added` [n] to the entry of each token's label in values [n, v], where this rank holds it."""
        self.add_at_columns(values, labels[:, None], added[:, None])

    def add_at_columns(self, values: Tensor, ids: Tensor, added: Tensor) -> None:
        """Add `added` [n, k] to the entries at each token's ids [n, k] in values [n, v], where this rank holds them."""
        if self.num_rows:
            column, is_local = self._locate(ids)
            values.scatter_add_(1, column, torch.where(is_local, added, 0.0))

    def put_at_labels(self, values: Tensor, labels: Tensor, put: Tensor) -> None:
        """Overwrite the entry of each token's label in values [n, v] with `put` [n], where this rank holds it."""
        if self.num_rows:
            column, is_local = self._locate(labels[:, None])
            values.scatter_(1, column, torch.where(is_local, put[:, None], values.gather(1, column)))

    def _locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (column [n, k] of each id [n, k], whether this rank holds it). Other ranks' ids get column 0."""
        column = ids - self.first_row
        is_local = (column >= 0) & (column < self.num_rows)
        return torch.where(is_local, column, 0), is_local

    def maximum(self, values: Tensor) -> Tensor:
        """Return [n]: the largest of values [n, v] over all ranks."""
        maximum = values.amax(dim=-1) if self.num_rows else values.new_full(values.shape[:1], LOWEST)
        self.all_reduce(maximum, dist.ReduceOp.MAX)
        return maximum

    def topk(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest of values [n, v] over all ranks, [n, k], and their ids [n, k] int64, largest first.

        With fewer than k tokens the last columns have LOWEST and an arbitrary id. Each rank sends k values and k ids.
        """
        local = values.new_full((values.shape[0], k), LOWEST)
        ids = torch.full((values.shape[0], k), self.first_row, device=values.device)
        count = min(k, self.num_rows)
        local[:, :count], columns = values.topk(count, dim=-1)
        ids[:, :count] += columns
        values, order = self.all_gather(local).topk(k, dim=-1)
        return values, self.all_gather(ids).gather(1, order)

    def all_gather(self, values: Tensor) -> Tensor:
        """Return [n, tp x k]: values [n, k] of all ranks side by side."""
        if self.group is None or dist.get_world_size(self.group) == 1:
            return values
        gathered = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, values, group=self.group)
        return torch.cat(gathered, dim=-1)

    def all_reduce(self, values: Tensor, op: Any) -> None:
        """All-reduce `values` [...] over the group by `op`, a `dist.ReduceOp`, in place."""
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(values, op=op, group=self.group)


@dataclass(frozen=True)
class Softmax:
    """The distributions of n tokens over the whole vocabulary, as statistics [n] each.

    With logits z and e = exp(z - maximum): total = sum e, moment = sum e (z - maximum), label_logit = z of the
    label, difference = sum e (z - z'), where z' are the logits of another model.
    """

    maximum: Tensor
    total: Tensor
    moment: Tensor
    label_logit: Tensor
    difference: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, shard: VocabShard, other: Tensor | None = None) -> Softmax:
        """Compute the statistics from this rank's logits [n, v], which stay unchanged. `other` holds another model's
        logits [n, v]; without it `difference` is 0.

        One maximum and four sums per token are all-reduced.
        """
        maximum = shard.maximum(logits)
        sums = logits.new_zeros(4, logits.shape[0])
        for columns in column_blocks(logits):
            shifted = logits[:, columns] - maximum[:, None]
            exponentials = shifted.exp()
            sums[0] += exponentials.sum(dim=-1)
            sums[1] += shifted.mul_(exponentials).sum(dim=-1)
            if other is not None:
                sums[3] += torch.sub(logits[:, columns], other[:, columns], out=shifted).mul_(exponentials).sum(dim=-1)
        sums[2] = shard.gather_at_labels(logits, labels)
        shard.all_reduce(sums, dist.ReduceOp.SUM)
        return cls(maximum, *sums)

    @property
    def log_normaliser(self) -> Tensor:
        """[n]: log sum exp z."""
        return self.maximum + self.total.log()

    @property
    def logprobs(self) -> Tensor:
        """[n]: log p of the labels."""
        return self.label_logit - self.maximum - self.total.log()

    @property
    def entropy(self) -> Tensor:
        """[n]: -sum p log p."""
        return self.total.log() - self.moment / self.total


class HeadGradients:
    """Accumulates the gradients of hidden [N, H] and weight [V/tp, H] over chunks. `needed` tells which of the two to
    compute. With `main_grad` [V/tp, H] float32 the weight's gradient is added there, unrounded, and not returned."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        shard: VocabShard,
        needed: tuple[bool, bool],
        main_grad: Tensor | None = None,
    ):
        self._hidden, self._weight, self._num_rows = hidden, weight, shard.num_rows
        self._grad_hidden = torch.empty_like(hidden) if needed[0] else None
        # Chunks are summed in float32: in bfloat16 the later ones would be lost to rounding.
        self._grad_weight = main_grad if needed[1] else None
        if needed[1] and main_grad is None:
            self._grad_weight = torch.empty_like(weight, dtype=sum_dtype(weight.dtype))
        self._into_main_grad, self._empty = main_grad is not None, main_grad is None
        self._cast: Tensor | None = None  # buffer for the logits' gradients of a chunk in the dtype of hidden

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        """Add the gradients of the tokens `rows`. `grad_logits` [n, v] is d loss / d (hidden weight^T) for them."""
        grad_logits, hidden = self._in_hidden_dtype(grad_logits), self._hidden[rows]
        if self._grad_hidden is not None:
            torch.mm(grad_logits, self._weight[: self._num_rows], out=self._grad_hidden[rows])
        if self._grad_weight is not None:
            total = self._grad_weight[: self._num_rows]
            if total.dtype == hidden.dtype:
                total.addmm_(grad_logits.t(), hidden, beta=0 if self._empty else 1)
            elif self._empty:
                total.copy_(grad_logits.t() @ hidden)
            else:
                device.add_product(total, grad_logits.t(), hidden)
        self._empty = False

    def _in_hidden_dtype(self, grad_logits: Tensor) -> Tensor:
        """Return `grad_logits` [n, v] in the dtype of hidden; overwrites the previous chunk's buffer."""
        if grad_logits.dtype == self._hidden.dtype:
            return grad_logits
        if self._cast is None:
            self._cast = torch.empty_like(grad_logits, dtype=self._hidden.dtype)
        return self._cast[: grad_logits.shape[0]].copy_(grad_logits)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Return gradients of hidden [N, H] and weight [V/tp, H] in their dtypes; None if unneeded or already added."""
        if self._grad_weight is None or self._into_main_grad:
            return self._grad_hidden, None
        self._grad_weight[0 if self._empty else self._num_rows :] = 0
        return self._grad_hidden, self._grad_weight.to(self._weight.dtype)


def chunks(num_tokens: int, chunk: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `chunk` tokens."""
    for start in range(0, num_tokens, chunk):
        yield slice(start, min(start + chunk, num_tokens))


def column_blocks(logits: Tensor) -> Iterator[slice]:
    """Yield consecutive column slices of logits [n, v], of the device's preferred size for elementwise operations."""
    width = max(1, device.block_elements() // logits.shape[0])
    for start in range(0, logits.shape[1], width):
        yield slice(start, start + width)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of logits and sums over them: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)
