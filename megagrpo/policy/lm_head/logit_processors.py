"""What vLLM does to logits between the LM head and the temperature, repeated on vocabulary-sharded logits.

The order is vLLM's: tokens that a grammar or `allowed_token_ids` forbid are excluded, then logit bias, then the
repetition penalty. Every change of a logit depends on the tokens before it alone, and on
the sampling parameters of its sample. All ranks of the last pipeline stage hold these, so nothing travels. A
tensor-parallel rank changes its own columns. For n rows of a chunk, masks have n x V bits, and the penalty touches
the columns of tokens that occurred: n x u numbers for u different tokens of the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megagrpo.data.tokens.grammar import Grammars, allowed
from megagrpo.policy.lm_head.vocab_shard import LOWEST, VocabShard, column_blocks
from megagrpo.train_types import MicroBatch, moved
from megagrpo.types import SamplingParams


@dataclass(frozen=True)
class SampleTokens:
    """The tokens of one sample [L], prompt and response."""

    ids: np.ndarray  # [L] int64

    @cached_property
    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """The u different tokens in the order of their first occurrence: ids [u], index of the first occurrence [u]."""
        ids, first = np.unique(self.ids, return_index=True)
        order = first.argsort()
        return ids[order], first[order]


@dataclass(frozen=True)
class Run:
    """Consecutive rows of a pass that predict consecutive tokens of one turn of the policy."""

    row: int  # the first row
    count: int
    sample: SampleTokens
    position: int  # index in the sample of the last token that the first row sees
    turn: int  # index in the sample of the turn's first token: vLLM counts from here, what is before it is its prompt
    sampling: SamplingParams  # of the sample

    def within(self, rows: slice) -> Run | None:
        """Return the part of the run in `rows`, numbered from the first of them; None without any."""
        start, stop = max(self.row, rows.start), min(self.row + self.count, rows.stop)
        skipped = start - self.row
        if start >= stop:
            return None
        return Run(start - rows.start, stop - start, self.sample, self.position + skipped, self.turn, self.sampling)


def runs_of(micro_batch: MicroBatch, tokens: Tensor, of_sequences: Sequence[SamplingParams]) -> list[Run]:
    """Return the runs of a pass over loss tokens at pack positions `tokens` [N]; all on the host. Turns are the runs
    of the loss mask: tokens of others are between two turns. `of_sequences` are the parameters of each sequence."""
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
        runs.append(Run(int(start), int(stop - start), sample, position, turn, of_sequences[number]))
    return runs


@dataclass(frozen=True)
class LogitProcessors:
    """The changes of the logits of a pass over N tokens, by its `runs`. Without `grammars` structured outputs are not
    repeated."""

    runs: tuple[Run, ...]
    grammars: Grammars | None = None

    @property
    def has_slopes(self) -> bool:
        """Whether a change multiplies logits, so that their gradients are multiplied too."""
        return any(run.sampling.repetition_penalty != 1 for run in self.runs)

    def apply(self, logits: Tensor, rows: slice, shard: VocabShard, slopes: Tensor | None = None) -> None:
        """Change the logits [n, v] of the tokens `rows` in place, before the temperature. `slopes` [n, v], if given, is
        multiplied by the derivative of the change."""
        for run in filter(None, (run.within(rows) for run in self.runs)) if shard.num_rows else ():
            part, sampling = logits[run.row : run.row + run.count], run.sampling
            if sampling.constraint is not None and self.grammars is not None:
                _exclude_by_grammar(part, run, shard, self.grammars)
            if sampling.allowed_token_ids:
                _exclude_others(part, sampling.allowed_token_ids, shard)
            if sampling.logit_bias:
                _add_bias(part, sampling.logit_bias, shard)
            if sampling.repetition_penalty != 1:
                _penalize(part, run, shard, None if slopes is None else slopes[run.row : run.row + run.count])


def _exclude_by_grammar(part: Tensor, run: Run, shard: VocabShard, grammars: Grammars) -> None:
    """Give the tokens that the grammar forbids in the rows of `run` [n, v] probability 0."""
    assert run.sampling.constraint is not None, "the caller checks"
    rows = grammars.masks(run.sampling.constraint, run.sample.ids, run.turn, run.position, run.count)
    masks = moved(rows, part.device)
    for columns in column_blocks(part):
        tokens = torch.arange(columns.start, min(columns.stop, shard.num_rows), device=part.device)
        part[:, columns].masked_fill_(~allowed(masks, tokens + shard.first_row), LOWEST)


def _exclude_others(part: Tensor, token_ids: Sequence[int], shard: VocabShard) -> None:
    """Give all but these tokens probability 0."""
    excluded = torch.ones(shard.num_rows, dtype=torch.bool)
    mine = [token - shard.first_row for token in token_ids if 0 <= token - shard.first_row < shard.num_rows]
    excluded[mine] = False
    part.masked_fill_(moved(excluded, part.device), LOWEST)


def _add_bias(part: Tensor, bias: Sequence[tuple[int, float]], shard: VocabShard) -> None:
    """Add the bias in this rank's columns."""
    last = shard.first_row + shard.num_rows
    mine = [(token - shard.first_row, added) for token, added in bias if shard.first_row <= token < last]
    numbers, biases = zip(*mine, strict=True) if mine else ((), ())
    columns = moved(torch.tensor(numbers, dtype=torch.int64), part.device)
    added = moved(torch.tensor(biases, dtype=torch.float64), part.device)
    part.index_add_(1, columns, added.to(part.dtype).expand(len(part), -1))


def _penalize(part: Tensor, run: Run, shard: VocabShard, slopes: Tensor | None) -> None:
    """Apply the penalty to the rows of `run` [n, v], in the columns of the tokens that they have seen."""
    ids, first = run.sample.distinct
    ids = ids[: np.searchsorted(first, run.position + run.count - 1, side="right")]
    mine = np.flatnonzero((ids >= shard.first_row) & (ids < shard.first_row + shard.num_rows))
    if not mine.size:
        return
    on_device = part.device
    columns = moved(torch.from_numpy(ids[mine] - shard.first_row), on_device)
    seen_logits = part.index_select(1, columns)
    positions = torch.arange(run.position, run.position + run.count, device=on_device)
    seen = moved(torch.from_numpy(first[mine]), on_device) <= positions[:, None]
    factor = seen_logits.new_tensor(run.sampling.repetition_penalty)
    factors = torch.where(seen_logits > 0, 1 / factor, factor).where(seen, 1.0)
    if slopes is not None:
        slopes.index_copy_(1, columns, slopes.index_select(1, columns).mul_(factors))
    part.index_copy_(1, columns, seen_logits * factors)
