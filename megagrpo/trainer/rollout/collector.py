"""The rollouts of a step: each replica generates and scores its share of prompts, and every rank gets all rollouts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from typing import Any

import torch

from megagrpo.config import RolloutSection
from megagrpo.engine.protocol import EngineError, EngineInterrupted, EngineStarved, Generator
from megagrpo.platform.parallel.agree import run_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.phases import Phases
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.trainer.rollout.async_rollouts import AsyncPool, place_of
from megagrpo.trainer.rollout.scored_groups import GroupSource, OnDemand, scored_rollouts, summed
from megagrpo.types import Dialogue, Prompt, SamplingParams, ScoredRollout, Truncation

STARVED = "starved"  # marks a rank whose engine needs weights before it can generate


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
    and are None on other ranks. So does `pool`, with asynchronous generation only."""

    layout: Layout
    engine: Generator | None
    rewards: RewardScorer | None
    phases: Phases
    pool: AsyncPool | None = None
    step: int = 0  # finished training steps, for reward functions that depend on the progress
    stop_signal: int = 0  # signal that asked this rank to stop; 0: none
    refill: Callable[[], None] = lambda: None  # gives the engine its weights again; collective

    def collect(
        self, prompts: Sequence[Prompt], num_generations: int, sampling: SamplingParams, seed: int
    ) -> tuple[list[ScoredRollout], dict[str, float]]:
        """Generate and score `num_generations` rollouts per prompt, in prompt order, with summed counters. Collective.

        Raises StopRequested on every rank when any rank was asked to stop, NoRollouts when a rank's engine fails.
        """
        self.stop_if_requested()  # the engine may lack the current weights: `Syncing.sync` skips the push then
        # before prompts are split over the replicas, so that no two replicas sample the same group
        prompts = numbered(prompts)
        ahead = self.pool is not None and all(prompt.place is not None for prompt in prompts)

        def part() -> tuple[list[tuple[int, list[ScoredRollout]]], dict[str, float]] | str | EngineError | None:
            mine = self._own_places(prompts) if ahead else self._own_slice(prompts)
            pool = self.pool if ahead else None
            arguments = [prompts[i] for i in mine], num_generations, sampling, seed, self.phases, self.step
            try:
                scored, counted = scored_rollouts(pool or self._on_demand(), *arguments)
            except EngineInterrupted:
                return None
            except EngineStarved:
                return STARVED
            except EngineError as error:
                return error
            counted |= {} if pool is None else pool.counters()
            return [*zip(mine, map(list, batched(scored, num_generations)), strict=True)], counted

        while STARVED in (parts := self._of_all(part)):
            self.refill()  # retry: the same seeds give the same rollouts
        parts = [part for part in parts if part is not None]
        groups = sorted((pair for groups, _ in parts for pair in groups), key=lambda pair: pair[0])
        return [s for _, scored in groups for s in scored], summed([counted for _, counted in parts])

    def _on_demand(self) -> GroupSource:
        assert self.engine is not None and self.rewards is not None, "the leader rank of a replica generates and scores"
        return OnDemand(self.engine, self.rewards)

    def _of_all(self, part: Callable[[], Any]) -> list[Any]:
        """Run `part` on each replica's leader and return the results of all ranks (None for others). Collective."""
        parts = run_and_agree(self.layout, lambda: part() if self.layout.is_dp_leader else None)
        self.stop_if_requested()
        for rank, failure in enumerate(parts):
            if isinstance(failure, EngineError):
                raise NoRollouts(
                    str(failure) if rank == self.layout.world_rank else f"rank {rank}: {failure}"
                ) from failure
        return parts

    def ask(
        self, prompts: Sequence[Prompt], num_generations: int, sampling: SamplingParams, seed: int, step: int
    ) -> None:
        """Request this replica's share of the prompts of the step after `step` steps, except those requested before."""
        assert self.pool is not None, "a run with rollout.max_staleness has a pool"
        mine, requested = [numbered(prompts)[i] for i in self._own_places(prompts)], self.pool.asked
        self.pool.ask(
            [prompt for prompt in mine if prompt.place not in requested], num_generations, sampling, seed, step
        )

    def finished_ahead(self) -> list[dict[str, Any]]:
        """Return all replicas' groups, generated but not collected, for `AsyncPool.load_state_dict`. Collective."""
        everyone = self.layout.all_gather_objects([] if self.pool is None else self.pool.state_dict())
        return [group for groups in everyone for group in groups]

    def _own_slice(self, prompts: Sequence[Prompt]) -> range:
        """The range of `prompts` this replica generates: contiguous, equally long on all replicas up to one prompt."""
        return range(*(len(prompts) * r // self.layout.dp_size for r in (self.layout.dp_rank, self.layout.dp_rank + 1)))

    def _own_places(self, prompts: Sequence[Prompt]) -> list[int]:
        """The indices of `prompts` that this replica generates when prompts are requested ahead. A prompt's replica
        depends on its place alone."""
        return [i for i, prompt in enumerate(prompts) if place_of(prompt) % self.layout.dp_size == self.layout.dp_rank]

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


def sampling_params(rollout: RolloutSection, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Build the sampling parameters of training rollouts."""
    truncation = Truncation(rollout.top_p, rollout.top_k, rollout.min_p)
    stop = tuple(rollout.stop), rollout.include_stop_str_in_output
    return SamplingParams(rollout.temperature, rollout.max_completion_length, stop_token_ids, truncation, *stop)


def numbered(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return copies of the prompts with `occurrence` set: how often the same prompt came before in this list."""
    seen: Counter[int] = Counter()
    copies = []
    for prompt in prompts:
        copies.append(replace(prompt, occurrence=seen[prompt.prompt_id]))
        seen[prompt.prompt_id] += 1
    return copies


def rollout_metrics(scored: Sequence[ScoredRollout]) -> dict[str, float]:
    """Return lengths and finish reasons of the responses, mean and std of each reward function over the rollouts it
    could score, and the numbers that functions logged, averaged over the rollouts of their calls."""
    lengths = [s.rollout.length for s in scored]
    ended = [length for s, length in zip(scored, lengths, strict=True) if s.rollout.finish_reason != "length"]
    metrics = {
        "num_tokens": float(sum(len(s.rollout.prompt.token_ids) + len(s.rollout.response_ids) for s in scored)),
        "num_generated_tokens": float(sum(lengths)),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
    }
    if ended:
        metrics["completions/mean_terminated_length"] = statistics.fmean(ended)
    if stops := [bool(s.rollout.stop_string) for s in scored if s.rollout.stop_string is not None]:
        metrics["completions/stop_string_ratio"] = statistics.fmean(stops)
    for name in scored[0].rewards:
        values = [reward for s in scored if (reward := s.rewards[name]) is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = statistics.fmean(values)
            metrics[f"rewards/{name}/std"] = statistics.stdev(values) if len(values) > 1 else 0.0
    for name in dict.fromkeys(name for s in scored for name in s.logged):
        metrics[f"rewards/{name}"] = statistics.fmean(s.logged[name] for s in scored if name in s.logged)
    return metrics | dialogue_metrics([s.rollout.dialogue for s in scored if s.rollout.dialogue is not None])


def staleness(scored: Sequence[ScoredRollout], weight_version: int) -> dict[str, float]:
    """Return the mean and maximum number of weight versions between a token's sampling and the policy trained on it."""
    ages = [weight_version - version for s in scored for version in s.rollout.token_versions]
    return {"staleness/mean": statistics.fmean(ages), "staleness/max": float(max(ages))}


def dialogue_metrics(dialogues: Sequence[Dialogue]) -> dict[str, float]:
    """Return turns and tool calls per response, the failed share of tool calls (as in TRL), and failed dialogues."""
    if not dialogues:
        return {}
    calls, failures = (sum(getattr(d, name) for d in dialogues) for name in ("tool_calls", "tool_failures"))
    return {
        "multi_turn/mean_turns": statistics.fmean(d.num_turns for d in dialogues),
        "multi_turn/failures": float(sum(d.ended == "failed" for d in dialogues)),
        "tools/call_frequency": calls / len(dialogues),
        "tools/failure_frequency": failures / calls if calls else 0.0,
    }
