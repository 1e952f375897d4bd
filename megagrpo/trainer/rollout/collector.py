"""The rollouts of a step: each replica generates, scores and keeps its share of prompts, and every rank gets the facts
of all samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megagrpo.algorithms.token_advantages import with_token_advantages
from megagrpo.config import AlgorithmSection
from megagrpo.data.packing.sample_table import Columns, Vote, branch_facts_of, facts_of, votes_of
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.packing.turn_table import turn_facts_of
from megagrpo.engine.http.protocol import EngineError, EngineStarved, Generator
from megagrpo.platform.parallel.agree import run_own_and_agree
from megagrpo.platform.parallel.bulk_messages import gather_rows
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.phases import Phases
from megagrpo.records.checkpoints.ahead_files import read_ahead
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.trainer.rollout.async_rollouts import AsyncPool, position_of
from megagrpo.trainer.rollout.scored_groups import GroupSource, OnDemand, scored_rollouts
from megagrpo.types import Prompt, SamplingParams, ScoredRollout

# what one replica sampled, its counters, and the votes of its groups
Part = tuple[list[ScoredRollout], dict[str, float], np.ndarray | None]


class StopRequested(Exception):
    """Ctrl-C or SIGTERM: save and stop. Raised before the step has trained anything."""

    def __init__(self, number: int):
        super().__init__(f"signal {number}")
        self.number = number


class NoRollouts(EngineError):
    """A rank's engine failed; the message names rank and cause. Raised on every rank, before the step has trained."""


@dataclass
class Collector:
    """Generates and scores rollouts on all replicas. `engine` and `rewards` exist on the leader rank of each replica
    and are None on other ranks. So does `pool`, if generation `runs_ahead`."""

    layout: Layout
    engine: Generator | None
    rewards: RewardScorer | None
    phases: Phases
    pool: AsyncPool | None = None
    kept: GroupSource | None = None  # in place of `engine`, with `rollout.kept`
    runs_ahead: bool = False  # with `rollout.max_staleness`
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)  # `advantage_by` decides what samples have
    step: int = 0  # finished training steps, for reward functions that depend on the progress
    stop_signal: int = 0  # signal that asked this rank to stop; 0: none
    refill: Callable[[], None] = lambda: None  # gives the engine its weights again; collective
    columns: Columns = field(default_factory=Columns)  # of facts so far, the same on every rank

    def collect(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingParams,
        seed: int,
        vote: Vote | None = None,
    ) -> tuple[StepSamples, dict[str, float]]:
        """Generate and score `num_generations` rollouts per prompt. Returns the samples in prompt order, and summed
        counters. With `vote`, the facts have the vote of each group. Collective.

        Each replica samples its share and keeps it; the facts of all samples go to every rank.

        Raises StopRequested on every rank when any rank was asked to stop, NoRollouts when a rank's engine fails.
        """
        self.stop_if_requested()  # the engine may lack the current weights: `Syncing.sync` skips the push then
        # before prompts are split over the replicas, so that no two replicas sample the same group
        prompts = numbered(prompts)
        ahead = self.runs_ahead and all(prompt.position is not None for prompt in prompts)
        sampled_by = np.array(self._by_place(prompts) if ahead else self._by_slice(len(prompts)))
        mine = np.flatnonzero(sampled_by == self.layout.dp_rank).tolist()

        sampled: list[Part] = []

        def part() -> Part:
            if (
                not sampled
            ):  # a retry is for replicas with starved engines: the pool of others has handed out its groups
                chosen = [prompts[i] for i in mine], num_generations, sampling, seed
                scored, counted = self._scored(*chosen, ahead)
                if self.algorithm.advantage_by_tokens:
                    scored = with_token_advantages(scored, num_generations, self.algorithm)
                sampled.append((scored, counted, votes_of(scored, num_generations, vote)))
            return sampled[0]

        while (found := self._attempt(part)) is None:
            self.refill()  # retry: the same seeds give the same rollouts
        sizes = [prompt.group_size(num_generations) for prompt in prompts]
        by_sample = np.repeat(sampled_by, sizes)
        columns = replace(self.columns, votes=vote is not None)
        facts, counters = self._of_all(found, columns, by_sample)
        branches = None
        if columns.branches:
            branches = self._rows(branch_facts_of(found[0], columns), np.repeat(by_sample, facts["branches"]))
        own = dict(zip(np.flatnonzero(by_sample == self.layout.dp_rank).tolist(), found[0], strict=False))
        of_samples = [prompt for prompt, size in zip(prompts, sizes, strict=True) for _ in range(size)]
        samples = StepSamples(of_samples, facts, by_sample, columns, own, branches)
        if self.algorithm.advantage_by_turns:
            rows, owners = turn_facts_of(found[0]), np.repeat(by_sample, samples.turn_counts)
            samples = replace(samples, turns=self._rows(rows, owners))
        return samples, counters

    def _scored(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, ahead: bool
    ) -> tuple[list[ScoredRollout], dict[str, float]]:
        """Return this replica's rollouts, in prompt order, and its counters; `ahead`: the pool has them."""
        pool = self.pool if ahead else None
        source = self.kept or pool or OnDemand(*self._generating())
        scored, counted = scored_rollouts(source, prompts, n, sampling, seed, self.phases, self.step)
        return scored, counted | ({} if pool is None else pool.counters())

    def _generating(self) -> tuple[Generator, RewardScorer]:
        assert self.engine is not None and self.rewards is not None, "the leader rank of a replica generates and scores"
        return self.engine, self.rewards

    def _attempt(self, part: Callable[[], Part]) -> Part | None:
        """Run `part` on each replica's leader and return its result, an empty one on other ranks. Collective.

        Returns None on every rank when an engine is starved. All ranks agree on new columns.
        """

        def outcome() -> Part | EngineError:
            try:
                return part() if self.layout.is_dp_leader else ([], {}, None)
            except EngineError as error:
                return error

        found = run_own_and_agree(self.layout, outcome)
        failure = found if isinstance(found, EngineError) else None
        new = Columns() if isinstance(found, EngineError) else Columns.of(*found[:2])
        is_starved, grows = isinstance(failure, EngineStarved), self.columns | new != self.columns
        # of several failures the one of the lowest rank counts, which has the largest number
        failed = 0 if failure is None or is_starved else self.layout.world_size - self.layout.world_rank
        mine = torch.tensor([self.stop_signal, failed, is_starved, grows], dtype=torch.int64)
        signal, failed, is_starved, grows = self.layout.all_reduce(mine, "max").tolist()
        if signal:
            raise StopRequested(signal)
        if failed:
            rank = self.layout.world_size - failed
            text = self.layout.broadcast_object(str(failure), rank)
            raise NoRollouts(text if rank == self.layout.world_rank else f"rank {rank}: {text}") from failure
        if grows:
            for columns in self.layout.all_gather_objects(new):
                self.columns |= columns
        return None if is_starved or isinstance(found, EngineError) else found

    def _of_all(self, part: Part, columns: Columns, sampled_by: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
        """Return the facts [N] of all samples, and the sums of the replicas' counters. Collective."""
        scored, counted, votes = part
        rows = facts_of(scored, columns, votes)
        header = np.array([counted.get(name, math.nan) for name in columns.counters])
        counts = np.bincount(sampled_by, minlength=self.layout.dp_size)
        sizes = (header.nbytes + counts * rows.itemsize).tolist()
        table = np.concatenate([header.view(np.uint8), rows.view(np.uint8)])
        facts, counters = np.empty(sampled_by.size, rows.dtype), Counter[str]()
        for dp_rank, received in enumerate(gather_rows(self.layout, table, sizes)):
            numbers = received[: header.nbytes].view(np.float64).tolist()
            counters.update({n: v for n, v in zip(columns.counters, numbers, strict=True) if not math.isnan(v)})
            facts[sampled_by == dp_rank] = received[header.nbytes :].view(rows.dtype)
        return facts, dict(counters)

    def _rows(self, rows: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """Return the rows of all replicas, of which each has `rows`, at the places where `owners` has its `dp_rank`.
        Collective."""
        sizes = (np.bincount(owners, minlength=self.layout.dp_size) * rows.itemsize).tolist()
        table = np.empty(owners.size, rows.dtype)
        if not owners.size:
            return table
        for dp_rank, received in enumerate(gather_rows(self.layout, rows.view(np.uint8), sizes)):
            table[owners == dp_rank] = received.view(rows.dtype)
        return table

    def ask(
        self, prompts: Sequence[Prompt], num_generations: int, sampling: SamplingParams, seed: int, step: int
    ) -> None:
        """Request this replica's share of the prompts of the step after `step` steps, except those requested before."""
        assert self.pool is not None, "a run with rollout.max_staleness has a pool"
        shares = zip(numbered(prompts), self._by_place(prompts), strict=True)
        mine, requested = [prompt for prompt, by in shares if by == self.layout.dp_rank], self.pool.asked
        self.pool.ask(
            [prompt for prompt in mine if prompt.position not in requested], num_generations, sampling, seed, step
        )

    def finished_ahead(self) -> list[dict[str, Any]]:
        """Return this replica's groups, generated but not collected, as JSON values."""
        return [] if self.pool is None else self.pool.state_dict()

    def restore_ahead(self, checkpoint: Path, listed: Sequence[dict[str, Any]]) -> None:
        """Restore the groups that belong to this replica from a checkpoint: its files, or `listed` in its state."""
        if self.pool is not None:
            mine = self.layout.dp_rank, self.layout.dp_size
            listed = [group for group in listed if group["place"] % mine[1] == mine[0]]
            self.pool.load_state_dict([*listed, *read_ahead(checkpoint, *mine)])

    def _by_slice(self, count: int) -> list[int]:
        """The replica that generates each of `count` prompts: contiguous shares that differ by at most one prompt."""
        borders = [count * r // self.layout.dp_size for r in range(self.layout.dp_size + 1)]
        return [r for r, (start, stop) in enumerate(pairwise(borders)) for _ in range(start, stop)]

    def _by_place(self, prompts: Sequence[Prompt]) -> list[int]:
        """The replica that generates each prompt when prompts are requested ahead. It depends on its position alone."""
        return [position_of(prompt) % self.layout.dp_size for prompt in prompts]

    def reward_tracebacks(self, names: Sequence[str]) -> str:
        """Return each of these reward functions' first traceback, from the lowest rank with one. Collective."""
        everyone = self.layout.all_gather_objects({} if self.rewards is None else self.rewards.tracebacks)
        known = {name: text for tracebacks in reversed(everyone) for name, text in tracebacks.items()}
        return "\n".join(known[name] for name in names if name in known)

    def stop(self, number: int) -> None:
        """Request a stop because of signal `number`. The current step is finished, or abandoned during generation."""
        self.stop_signal = number
        if self.engine is not None:
            self.engine.interrupt()

    def stop_if_requested(self) -> None:
        """Raise StopRequested on every rank when any rank was asked to stop. Collective."""
        if number := self.stop_requested():
            raise StopRequested(number)

    def stop_requested(self) -> int:
        """Return the number of the signal that asked any rank to stop, or 0. Collective."""
        return int(self.layout.all_reduce(torch.tensor(self.stop_signal), "max"))


def numbered(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return copies of the prompts with `occurrence` set: how often the same prompt came before in this list."""
    seen: Counter[int] = Counter()
    copies = []
    for prompt in prompts:
        copies.append(replace(prompt, occurrence=seen[prompt.prompt_id]))
        seen[prompt.prompt_id] += 1
    return copies
