"""The way of the tokens: each sample travels once, from the leader that sampled it to the ranks that train on it.

Facts and packing are the same on every rank, so every rank computes which leader sends what, in which order, and no
sizes travel. A row has 4 bytes for each token of prompt and response and 4 more for each token of the response; with
conversations a bit more for each token of the response, and 4 bytes more with `advantage_by` token or process. Sampling
parameters of a row of the data set travel as JSON. Rows go from leader to leader in an all-to-all, then from the leader
to the ranks of its replica that read tokens: all tensor- and context-parallel ranks of the first pipeline stage, which
embeds, and of the last, which computes the loss.
Context-parallel ranks get whole rows, because the loss reads whole rows. Middle stages need only lengths, and the masks
of conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megagrpo.data.packing.readings import with_teachers
from megagrpo.data.packing.sample_packing import PackPlan
from megagrpo.data.packing.sample_table import TRUNCATED
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.tokens.sampling import of_row, sampling_row
from megagrpo.platform.parallel.bulk_messages import exchange_rows, share_rows
from megagrpo.platform.parallel.layout import Layout
from megagrpo.train_types import TrainSample
from megagrpo.types import ScoredRollout

RowOf = Callable[[ScoredRollout], np.ndarray]  # the int32 words of a sample

ROUND_WORDS = 2**26  # words of 4 bytes that a leader sends in one message: 256 MiB
WORD_BITS = 32


def trained_samples(
    samples: StepSamples, plans: Sequence[PackPlan], layout: Layout, round_words: int = ROUND_WORDS
) -> dict[int, TrainSample]:
    """Return the samples, by index, that the plans give to this rank's replica. `samples` are `StepSamples.every` of a
    step. Collective.

    On middle pipeline stages token ids and log-probs are 0: no layer there reads them.
    """
    lengths, responses = samples.facts["length"].astype(np.int64), samples.responses
    travel = Travel(samples, trained_by(plans, len(samples), layout.dp_size), layout, round_words)
    tokens = travel.rows(lengths + responses, _token_row, layout.ends)
    masks: dict[int, np.ndarray] = {}
    if samples.columns.dialogues:
        masks = travel.rows(-(-responses // WORD_BITS), _mask_row, layout.replica)
    of_tokens: dict[int, np.ndarray] = {}
    if samples.columns.token_advantages:
        of_tokens = travel.rows(responses, _advantage_row, layout.ends)
    advantages, truncated = plans[0].shapes.advantages, samples.has(TRUNCATED)
    own: dict[int, np.ndarray] = {}
    if samples.columns.samplings:  # middle stages pack what teachers read
        words = samples.facts["sampling"].astype(np.int64)
        own = travel.rows(words, lambda s: sampling_row(s.rollout.prompt), layout.replica)

    def sample(index: int) -> TrainSample:
        length, response = int(lengths[index]), int(responses[index])
        ids, logprobs = np.zeros(length, np.int64), np.zeros(length, np.float32)
        written = np.arange(length) >= length - response
        if index in tokens:
            ids[:], logprobs[length - response :] = tokens[index][:length], tokens[index][length:].view(np.float32)
        if index in masks:
            written[length - response :] = np.unpackbits(masks[index].view(np.uint8), count=response)
        rows = torch.from_numpy(ids), torch.from_numpy(written), torch.from_numpy(logprobs)
        inputs, sampling = samples.prompts[index].inputs, of_row(own[index]) if index in own else {}
        teachers = sampling.pop("teachers", None)
        row = None
        if index in of_tokens:
            row = torch.zeros(length)
            row[length - response :] = torch.from_numpy(of_tokens[index].view(np.float32))
        advantage, is_truncated = float(advantages[index]), bool(truncated[index])
        made = TrainSample(*rows, advantage, index, is_truncated, inputs, sampling, token_advantages=row)
        return made if teachers is None else with_teachers(made, teachers, response)

    return {index: sample(index) for index in travel.received.tolist()}


def trained_by(plans: Sequence[PackPlan], num_samples: int, dp_size: int) -> np.ndarray:
    """Return the data-parallel rank [N] that trains on each sample; -1 for a skipped one."""
    ranks = np.full(num_samples, -1)
    for plan in plans:
        for dp_rank in range(dp_size):
            ranks[np.concatenate(plan.of_rank(dp_rank))] = dp_rank
    return ranks


class Travel:
    """The rows of a step between replicas. A sender's samples go in ascending order, in rounds of bounded size."""

    def __init__(self, samples: StepSamples, ranks: np.ndarray, layout: Layout, round_words: int):
        self._samples, self._trained_by, self._layout, self._round_words = samples, ranks, layout, round_words
        self.received = np.flatnonzero(ranks == layout.dp_rank)  # samples that this replica trains on

    def rows(self, words: np.ndarray, row_of: RowOf, group: dist.ProcessGroup | None) -> dict[int, np.ndarray]:
        """Return the rows of this replica's samples on the ranks of `group`, {} on others. Sample i has `words[i]`
        words of 4 bytes, which `row_of` makes of it. Collective."""
        found: dict[int, np.ndarray] = {}
        for mine, table in self.tables(words, row_of):
            if group is not None:
                table = np.zeros(int(words[mine].sum()), np.int32) if table is None else table
                rows = np.split(share_rows(self._layout, table, group), words[mine].cumsum())
                found |= zip(mine.tolist(), rows, strict=False)  # after the last border there is an empty row
        return found

    def tables(self, words: np.ndarray, row_of: RowOf) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yield for each round the samples that this replica gets, and on its leader the table of their rows in this
        order; None on other ranks. Collective, also for ranks that do not use the tables."""
        for chosen in self._rounds(words):
            mine = chosen[self._trained_by[chosen] == self._layout.dp_rank]
            mine = mine[np.argsort(self._samples.sampled_by[mine], kind="stable")]  # as the senders' parts arrive
            yield mine, None if self._layout.leaders is None else self._exchanged(chosen, words, row_of)

    def _rounds(self, words: np.ndarray) -> list[np.ndarray]:
        """Return the samples of each round, ascending. A sender begins a round with each `round_words` words."""
        sampled_by, rounds = self._samples.sampled_by, np.full(words.size, -1)
        for sender in range(self._layout.dp_size):
            own = np.flatnonzero((sampled_by == sender) & (self._trained_by >= 0))
            rounds[own] = (words[own].cumsum() - words[own]) // self._round_words
        return [np.flatnonzero(rounds == number) for number in range(int(rounds.max(initial=-1)) + 1)]

    def _exchanged(self, chosen: np.ndarray, words: np.ndarray, row_of: RowOf) -> np.ndarray:
        layout, samples = self._layout, self._samples
        own = chosen[samples.sampled_by[chosen] == layout.dp_rank]
        own = own[np.argsort(self._trained_by[own], kind="stable")]
        mine = chosen[self._trained_by[chosen] == layout.dp_rank]
        sent = np.bincount(self._trained_by[own], words[own], layout.dp_size).astype(int)
        received = np.bincount(samples.sampled_by[mine], words[mine], layout.dp_size).astype(int)
        table = np.empty(int(sent.sum()), np.int32)
        stops = words[own].cumsum()
        for index, stop in zip(own.tolist(), stops.tolist(), strict=True):
            table[stop - int(words[index]) : stop] = row_of(samples.own[index])
        return exchange_rows(layout, table, sent.tolist(), received.tolist())


def _token_row(scored: ScoredRollout) -> np.ndarray:
    """Return token ids of prompt and response, then the log-probs of the response, as words."""
    rollout = scored.rollout
    prompt = np.array(rollout.prompt.token_ids, np.int32)
    return np.concatenate([prompt, rollout.response_ids, np.ascontiguousarray(rollout.rollout_logprobs).view(np.int32)])


def _mask_row(scored: ScoredRollout) -> np.ndarray:
    """Return the bits of `Rollout.written` as words."""
    bits = np.packbits(scored.rollout.written)
    return np.pad(bits, (0, -bits.size % 4)).view(np.int32)


def _advantage_row(scored: ScoredRollout) -> np.ndarray:
    """Return `token_advantages` of the response as words; 0 without any."""
    if not scored.token_advantages:
        return np.zeros(len(scored.rollout.response_ids), np.int32)
    return np.ascontiguousarray(scored.token_advantages[0], np.float32).view(np.int32)
