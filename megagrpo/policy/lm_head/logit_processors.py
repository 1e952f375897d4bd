"""What vLLM does to logits between the LM head and the temperature, repeated on vocabulary-sharded logits.

The order is vLLM's: tokens that a grammar forbids are excluded, then logit bias, then repetition, frequency and
presence penalties. Every change of a logit depends on the tokens before it alone. All ranks of the last pipeline stage
hold these, so nothing travels. A tensor-parallel rank changes its own columns. For n rows of a chunk, masks have n x V
bits, and penalties touch the columns of tokens that occurred: n x u numbers for u different tokens of the sample.
Counts [T, V] never exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megagrpo.data.grammar import Grammar, allowed
from megagrpo.policy.lm_head.vocab_shard import LOWEST, VocabShard, column_blocks
from megagrpo.train_types import MicroBatch, moved
from megagrpo.types import NO_PENALTIES, Penalties


@dataclass(frozen=True)
class SampleTokens:
    """The tokens of one sample [L], prompt and response."""

    ids: np.ndarray  # [L] int64

    @cached_property
    def distinct(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The u different tokens in the order of their first occurrence: ids [u], index of the first occurrence [u],
        and of each token its index among them [L]."""
        ids, first, inverse = np.unique(self.ids, return_index=True, return_inverse=True)
        order = first.argsort()
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        return ids[order], first[order], rank[inverse]


@dataclass(frozen=True)
class Run:
    """Consecutive rows of a pass that predict consecutive tokens of one turn of the policy."""

    row: int  # the first row
    count: int
    sample: SampleTokens
    position: int  # index in the sample of the last token that the first row sees
    turn: int  # index in the sample of the turn's first token: vLLM counts from here, what is before it is its prompt

    def within(self, rows: slice) -> Run | None:
        """Return the part of the run in `rows`, numbered from the first of them; None without any."""
        start, stop = max(self.row, rows.start), min(self.row + self.count, rows.stop)
        skipped = start - self.row
        if start >= stop:
            return None
        return Run(start - rows.start, stop - start, self.sample, self.position + skipped, self.turn)


def runs_of(micro_batch: MicroBatch, tokens: Tensor) -> list[Run]:
    """Return the runs of a pass over loss tokens at pack positions `tokens` [N]; all on the host. Turns are the runs
    of the loss mask: tokens of others are between two turns."""
    ids, mask, places = micro_batch.token_ids.numpy(), micro_batch.loss_mask.numpy(), tokens.numpy()
    borders = micro_batch.cu_seqlens.tolist()
    prefixes = [-1] * micro_batch.num_sequences if micro_batch.prefixes is None else micro_batch.prefixes.tolist()
    sequence = micro_batch.sequence_index.numpy()[places]
    # A turn begins at each loss token without one before it in its sequence.
    begins = mask & ~np.append(False, mask[:-1])
    begins[micro_batch.cu_seqlens[:-1].numpy()] = mask[micro_batch.cu_seqlens[:-1].numpy()]
    first = np.maximum.accumulate(np.where(begins, np.arange(mask.size), -1))[places]
    splits = np.flatnonzero((np.diff(places) != 1) | (np.diff(first) != 0)) + 1
    samples: dict[int, tuple[SampleTokens, int]] = {}  # by sequence, with the pack position that its index 0 would have
    runs = []
    for start, stop in zip([0, *splits], [*splits, places.size], strict=True) if places.size else ():
        number = int(sequence[start])
        if number not in samples:
            own = ids[borders[number] : borders[number + 1]]
            prefix = prefixes[number]
            before = ids[borders[prefix] : borders[prefix + 1]] if prefix >= 0 else own[:0]
            samples[number] = SampleTokens(np.concatenate([before, own])), borders[number] - before.size
        sample, origin = samples[number]
        position, turn = int(places[start]) - origin, int(first[start]) - origin + 1
        runs.append(Run(int(start), int(stop - start), sample, position, turn))
    return runs


@dataclass(frozen=True)
class LogitProcessors:
    """The changes of the logits of a pass over N tokens. `runs` are those of the pass, for penalties and `grammar`."""

    bias: tuple[tuple[int, float], ...] = ()  # (token id, what its logit gets)
    penalties: Penalties = NO_PENALTIES
    runs: tuple[Run, ...] = ()
    grammar: Grammar | None = None  # of structured outputs

    @property
    def has_slopes(self) -> bool:
        """Whether a change multiplies logits, so that their gradients are multiplied too."""
        return self.penalties.repetition != 1

    def apply(self, logits: Tensor, rows: slice, shard: VocabShard, slopes: Tensor | None = None) -> None:
        """Change the logits [n, v] of the tokens `rows` in place, before the temperature. `slopes` [n, v], if given, is
        multiplied by the derivative of the change."""
        for run in self._runs_within(rows) if self.grammar is not None and shard.num_rows else ():
            self._exclude(logits, run, shard)
        if self.bias and shard.num_rows:
            columns, added = (moved(row, logits.device) for row in self._columns_and_bias(shard))
            logits.index_add_(1, columns, added.to(logits.dtype).expand(len(logits), -1))
        for run in self._runs_within(rows) if self.penalties and shard.num_rows else ():
            self._penalize(logits, run, shard, slopes)

    def _exclude(self, logits: Tensor, run: Run, shard: VocabShard) -> None:
        """Give the tokens that the grammar forbids in the rows of `run` probability 0."""
        assert self.grammar is not None, "the caller checks"
        masks = moved(self.grammar.masks(run.sample.ids, run.turn, run.position, run.count), logits.device)
        part = logits[run.row : run.row + run.count]
        for columns in column_blocks(part):
            tokens = torch.arange(columns.start, min(columns.stop, shard.num_rows), device=logits.device)
            part[:, columns].masked_fill_(~allowed(masks, tokens + shard.first_row), LOWEST)

    def _columns_and_bias(self, shard: VocabShard) -> tuple[Tensor, Tensor]:
        """Return the local columns [b] that get a bias, and the biases [b] float64."""
        last = shard.first_row + shard.num_rows
        mine = [(token - shard.first_row, added) for token, added in self.bias if shard.first_row <= token < last]
        columns, added = zip(*mine, strict=True) if mine else ((), ())
        return torch.tensor(columns, dtype=torch.int64), torch.tensor(added, dtype=torch.float64)

    def _runs_within(self, rows: slice) -> Iterator[Run]:
        return filter(None, (run.within(rows) for run in self.runs))

    def _penalize(self, logits: Tensor, run: Run, shard: VocabShard, slopes: Tensor | None) -> None:
        """Apply the penalties to the rows of `run`, in the columns of the tokens that they have seen."""
        ids, first, index = run.sample.distinct
        ids = ids[: np.searchsorted(first, run.position + run.count - 1, side="right")]
        mine = np.flatnonzero((ids >= shard.first_row) & (ids < shard.first_row + shard.num_rows))
        if not mine.size:
            return
        on_device = logits.device
        columns = moved(torch.from_numpy(ids[mine] - shard.first_row), on_device)
        rows = slice(run.row, run.row + run.count)
        seen_logits = logits[rows].index_select(1, columns)
        if (repetition := self.penalties.repetition) != 1:
            positions = torch.arange(run.position, run.position + run.count, device=on_device)
            seen = moved(torch.from_numpy(first[mine]), on_device) <= positions[:, None]
            factor = seen_logits.new_tensor(repetition)
            factors = torch.where(seen_logits > 0, 1 / factor, factor).where(seen, 1.0)
            seen_logits *= factors
            if slopes is not None:
                slopes[rows].index_copy_(1, columns, slopes[rows].index_select(1, columns).mul_(factors))
        if self.penalties.counts:
            counts = moved(self._counts(run, index, mine), on_device).to(logits.dtype).cumsum(0)
            seen_logits -= self.penalties.frequency * counts
            seen_logits -= self.penalties.presence * counts.clamp(max=1)
        logits[rows].index_copy_(1, columns, seen_logits)

    def _counts(self, run: Run, index: np.ndarray, mine: np.ndarray) -> Tensor:
        """Return [n, u] float32, whose sum over rows up to i counts each of the u tokens in the turn before row i."""
        added = np.zeros((run.count, mine.size), np.float32)
        added[0] = np.bincount(index[run.turn : run.position + 1], minlength=int(mine[-1]) + 1)[mine]
        column_of = np.full(int(index.max()) + 1, -1)
        column_of[mine] = np.arange(mine.size)
        later = column_of[index[run.position + 1 : run.position + run.count]]
        held = np.flatnonzero(later >= 0)
        added[held + 1, later[held]] = 1
        return torch.from_numpy(added)
