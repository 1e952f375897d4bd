"""Generated groups with their scoring, as a stream: what a step, an evaluation and `megagrpo eval` read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator as Stream
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from megagrpo.engine.http.protocol import Generator
from megagrpo.platform.process.phases import Phases
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.rewards.scoring import Scoring
from megagrpo.types import Prompt, Rollout, SamplingParams, ScoredRollout


@dataclass(frozen=True)
class ScoredGroup:
    """A finished group: the index of its prompt, its rollouts, and their scoring, which may still run."""

    index: int
    rollouts: list[Rollout]
    scoring: Scoring


class GroupSource(Protocol):
    """Generates groups and begins to score each: `OnDemand` when they are asked for, `AsyncPool` ahead of that."""

    def groups(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, step: int
    ) -> Stream[ScoredGroup]:
        """Yield `n` rollouts of each prompt as soon as they are generated. A group is scored while others are
        generated. `step` has the meaning of `RewardScorer.begin`. Raises the errors of `Generator.groups`."""


@dataclass(frozen=True)
class OnDemand:
    """A source that generates its groups when they are asked for, with a vLLM engine or as conversations."""

    engine: Generator
    rewards: RewardScorer

    def groups(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, step: int
    ) -> Stream[ScoredGroup]:
        """Yield `n` rollouts of each prompt; see `GroupSource.groups`. After an error no group is scored any longer."""
        begun = []
        try:
            with closing(self.engine.groups(prompts, n, sampling, seed)) as finished:
                for index, rollouts in finished:
                    begun.append(begin_scoring(self.rewards, index, rollouts, step))
                    yield begun[-1]
        except BaseException:
            for group in begun:
                group.scoring.drop()
            raise


def begin_scoring(rewards: RewardScorer, index: int, rollouts: list[Rollout], step: int) -> ScoredGroup:
    """Begin to score a finished group, with the functions of its task."""
    scoring = rewards.begin(step, task=rollouts[0].prompt.task)
    scoring.add(0, rollouts)
    return ScoredGroup(index, rollouts, scoring)


def scored_rollouts(
    source: GroupSource,
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingParams,
    seed: int,
    phases: Phases,
    step: int = 0,
) -> tuple[list[ScoredRollout], dict[str, float]]:
    """Return `n` scored rollouts of each prompt, in prompt order, and the summed counters. Raises the errors of
    `GroupSource.groups`."""
    scorings: dict[int, Scoring] = {}
    sizes = [prompt.group_size(n) for prompt in prompts]
    with phases("generate") as task, closing(source.groups(prompts, n, sampling, seed, step)) as groups:
        task.expect(sum(sizes), "responses")
        for group in groups:
            scorings[group.index] = group.scoring
            task.advance(sizes[group.index], tokens=sum(len(rollout.response_ids) for rollout in group.rollouts))
    scored: list[ScoredRollout] = []
    with phases("reward") as task:
        task.expect(sum(sizes), "responses")
        for index in sorted(scorings):
            scored += scorings[index].finish()
            task.advance(sizes[index])
    dialogues = [dialogue for s in scored if (dialogue := s.rollout.dialogue) is not None]
    of_dialogues = [{name: float(count) for name, count in dialogue.counts.items()} for dialogue in dialogues]
    return scored, summed([*(scoring.counters() for scoring in scorings.values()), *of_dialogues])


def summed(counters: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up counters by name."""
    total: Counter[str] = Counter()
    for counted in counters:
        total.update(counted)
    return dict(total)
