"""Log of single tokens: `tokens.jsonl` holds the log-probs of some groups of each step, for `megagrpo report`.

One line per response of these groups:
step              the step, counted from 1
sample            index of the response among the step's lines in `completions.jsonl`, from 0
prompt_id         row of the prompt in the data set
tokens            the text of each token [Lr]; a character of several tokens is in the first of them
rollout_logprobs  [Lr], reported by vLLM
trainer_logprobs  [Lr], computed by the trainer with the same weights; null for a token that is not trained
entropy           [Lr] in nats, by the trainer; null for a token that is not trained
advantages        [Lr], with `algorithm.advantage_by` token or process; null for a token that the policy did not write

Numbers are rounded to `LOGGED_DIGITS` decimals. Nothing here changes the loss inputs, and no extra forward pass runs.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagrpo.data.tokens.token_texts import TokenTexts
from megagrpo.platform.parallel.bulk_messages import PartError, parts_to_first_rank
from megagrpo.platform.parallel.layout import Layout
from megagrpo.records.rows.jsonl_file import JsonlFile, encoded
from megagrpo.records.rows.recorder import Recorder, TrainedRollouts, Update
from megagrpo.train_types import LossFn, LossInputs, LossOutput

TOKENS_FILE = "tokens.jsonl"
LOGGED_DIGITS = 3

SampleValues = dict[int, tuple[list[float], list[float]]]  # sample -> log-probs and entropies of its loss tokens


@dataclass
class TokenLog(Recorder):
    """Collects the numbers of the chosen groups while the loss is computed, and writes them at the end of the step.

    `num_groups` is `run.log_tokens_groups`; 0 makes every method a no-op. Rank 0 writes; `finish` is collective.
    """

    layout: Layout | None = None
    texts: TokenTexts | None = None
    num_groups: int = 0
    group_size: int = 1
    say: Callable[[str], None] = print
    _file: JsonlFile | None = None
    _chosen: list[int] = field(default_factory=list)  # samples of this step
    _inputs: dict[int, list[Tensor]] = field(default_factory=dict)  # of the current optimizer step, by micro-batch
    _values: SampleValues = field(default_factory=dict)
    _reported: bool = False  # whether a failure was reported

    def open(self, folder: Path, restored_step: int) -> None:
        """Open the file, on rank 0. Lines of steps after `restored_step` are removed: these steps are repeated."""
        if self.num_groups:
            try:
                self._file = JsonlFile(folder / TOKENS_FILE, restored_step)
            except OSError as error:
                self._failed(error)

    def begin(self, rollouts: TrainedRollouts) -> None:
        """Choose the samples of this step: the groups whose advantages differ most."""
        self._chosen, self._values = (
            chosen_samples(rollouts.advantages, rollouts.samples.groups(self.group_size), self.num_groups),
            {},
        )

    def wrap_loss(self, loss_fn: LossFn) -> LossFn:
        """Return `loss_fn` wrapped to keep its inputs of one optimizer step until `after_update`."""
        self._inputs = {}
        layout = self.layout
        # other tp and cp ranks have the same inputs
        if not self._chosen or layout is None or layout.tp_rank or layout.cp_rank:
            return loss_fn

        chosen = set(self._chosen)

        def recording(inputs: LossInputs) -> LossOutput:
            # A policy may compute the loss of a part in advance: the last call for a micro-batch is the one that
            # trains.
            if not chosen.isdisjoint(inputs.micro_batch.samples.tolist()):
                self._inputs[id(inputs.micro_batch)] = _columns(inputs)
            return loss_fn(inputs)

        return recording

    def after_update(self, update: Update) -> None:
        """Keep the values of the chosen samples that are trained on for the first time in this step."""
        missing = set(self._chosen) - set(self._values)
        for columns in self._inputs.values():
            self._values |= values_of_samples(columns, missing)
        self._inputs = {}

    def finish(self, rollouts: TrainedRollouts) -> None:
        """Write the lines of the step. The ranks that train on the chosen samples send the trainer's numbers to rank 0,
        the leaders that sampled them the rest of each line. Collective."""
        if not self._chosen or self.layout is None:
            return
        rank, samples = self.layout.world_rank, rollouts.samples
        # a sample that is not trained on has no numbers, so any rank may send them
        trains = torch.tensor([rank if sample in self._values else 0 for sample in self._chosen])
        trained_on = self.layout.all_reduce(trains, "max").tolist()
        sampled_on = [self.layout.leader_of(int(samples.sampled_by[sample])) for sample in self._chosen]

        def parts(turn: int) -> Iterator[bytes]:
            sample = self._chosen[turn // 2]
            yield encoded([self._line(rollouts, sample) if turn % 2 else {"numbers": self._values.get(sample)}])

        lines = parts_to_first_rank(self.layout, list(chain(*zip(trained_on, sampled_on, strict=True))), parts)
        with suppress(PartError):
            self._write(lines)
            deque(lines, maxlen=0)  # the rest after an error: other ranks wait until their lines are taken
        self._values = {}

    def _write(self, lines: Iterator[bytes]) -> None:
        """Write the lines on rank 0: two parts each, the trainer's numbers and the rest."""
        try:
            numbers: tuple[list[float], list[float]] | None = None
            for row in map(json.loads, lines):
                if "numbers" in row:
                    numbers = row["numbers"]
                elif self._file is not None:
                    logprobs, entropy = (_per_token(values, row["written"]) for values in numbers or ([], []))
                    del row["written"]
                    self._file.append([row | {"trainer_logprobs": logprobs, "entropy": entropy}])
        except (OSError, PartError) as error:
            self._failed(error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _line(self, rollouts: TrainedRollouts, sample: int) -> dict[str, Any]:
        """Return the line of a sample without the trainer's numbers, and `written`."""
        scored = rollouts.samples.own[sample]
        rollout, advantages = scored.rollout, dict[str, Any]()
        if scored.token_advantages:
            row = scored.token_advantages[0] + rollouts.advantages[sample]
            own = [round(value, LOGGED_DIGITS) for value in row[rollout.written].tolist()]
            advantages = {"advantages": _per_token(own, rollout.written.tolist())}
        return {
            "step": rollouts.step,
            "sample": sample,
            "prompt_id": rollout.prompt.prompt_id,
            "tokens": [] if self.texts is None else self.texts.of(rollout.response_ids.tolist()),
            "rollout_logprobs": [round(value, LOGGED_DIGITS) for value in rollout.rollout_logprobs.tolist()],
            **advantages,
            "written": rollout.written.tolist(),
        }

    def _failed(self, error: Exception) -> None:
        """Report the first failure; later steps are tried again."""
        if self._reported:
            return
        self._reported = True
        self.say(
            f"warning: {TOKENS_FILE} failed and may be incomplete; training continues. {type(error).__name__}: {error}"
        )


def chosen_samples(advantages: Sequence[float], groups: np.ndarray, num_groups: int) -> list[int]:
    """Return the samples of the `num_groups` of `groups` [N] with the largest range of advantages, in order."""
    starts = np.unique(groups, return_index=True)[1].tolist()
    stops = dict(pairwise([*starts, groups.size]))
    own = {start: advantages[start:stop] for start, stop in stops.items()}
    spread = {start: max(group) - min(group) for start, group in own.items() if all(map(math.isfinite, group))}
    best = sorted(spread, key=lambda start: (-spread[start], start))[:num_groups]
    return [sample for start in sorted(best) for sample in range(start, stops[start])]


def _columns(inputs: LossInputs) -> list[Tensor]:
    """Return log-probs (the trainer's old ones, if any), entropy, loss mask, borders and samples of a micro-batch."""
    batch, old = inputs.micro_batch, inputs.micro_batch.terms.old_logprobs
    logprobs = inputs.policy_logprobs if old is None else old
    return [logprobs.detach(), inputs.entropy.detach(), batch.loss_mask, batch.cu_seqlens, batch.samples]


def values_of_samples(columns: Sequence[Tensor], chosen: set[int]) -> SampleValues:
    """Return the rounded log-probs and entropies of the chosen samples, at their loss tokens, from `_columns`."""
    samples = columns[-1].tolist()
    by_sample: SampleValues = {}
    if chosen.isdisjoint(samples):  # copies nothing from a GPU
        return by_sample
    logprobs, entropy, mask, borders = (column.cpu() for column in columns[:-1])
    for index, sample in enumerate(samples):
        if sample in chosen:
            span = slice(int(borders[index]), int(borders[index + 1]))
            values = [rounded(row[span][mask[span]]) for row in (logprobs, entropy)]
            before = by_sample.get(sample, ([], []))  # a shared prompt is a separate sequence
            by_sample[sample] = (before[0] + values[0], before[1] + values[1])
    return by_sample


def rounded(values: Tensor) -> list[float]:
    """Return the values rounded to `LOGGED_DIGITS` decimals."""
    return [round(value, LOGGED_DIGITS) for value in values.to(torch.float64).tolist()]


def _per_token(values: Sequence[float], written: Sequence[bool]) -> list[float | None]:
    """Return one value per token of the response; None where the policy did not write the token, or without values."""
    rest = iter(values)
    return [next(rest, None) if by_policy else None for by_policy in written]
