"""Generated groups with their scoring, as a stream: what a step, an evaluation and `megagrpo eval` read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator as Stream
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from megagrpo.config import ConfigError, RunConfig
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.engine.http.protocol import EngineError, Generator
from megagrpo.platform.parallel.agree import on_first_rank, run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.phases import Phases
from megagrpo.records.rows.kept_rollouts import KeptRollouts, last_kept_step
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


@dataclass(frozen=True)
class KeptSource:
    """Hands out kept groups in place of an engine; see `GroupSource`."""

    kept: KeptRollouts
    rewards: RewardScorer

    def groups(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, step: int
    ) -> Stream[ScoredGroup]:
        """Yield `n` kept rollouts of each prompt for the step after `step` steps. Raises EngineError for a prompt
        without them."""
        for index, prompt in enumerate(prompts):
            try:
                rollouts = self.kept.group(step + 1, seed, prompt, prompt.group_size(n))
            except (LookupError, OSError) as error:
                raise EngineError(f"rollout.kept.path: {error}") from error
            yield begin_scoring(self.rewards, index, rollouts, step)


def open_kept(
    config: RunConfig, prompts: PromptOrder, rewards: RewardScorer | None, tokenizer: Tokenizer | None, layout: Layout
) -> KeptSource | None:
    """Open the kept rollouts of `rollout.kept.path` on each leader; None on other ranks. With `by` prompt, rows without
    rollouts are never drawn. Collective. Raises ValueError."""
    path, by = config.rollout.kept.folder, config.rollout.kept.by

    def opened() -> KeptSource | None:
        if rewards is None or tokenizer is None:
            return None
        return KeptSource(KeptRollouts(path, by, tokenizer.decode), rewards)

    source = run_own_and_agree(layout, opened)
    if by == "prompt":
        leave_out_others(prompts, on_first_rank(layout, lambda: source.kept.prompt_ids if source else set()))
    return source


def last_step(config: RunConfig, layout: Layout) -> int:
    """Return the run's last step: that of the kept rollouts, if they end earlier. Collective. Raises ConfigError for
    rollouts without steps."""
    kept, steps = config.rollout.kept, config.run.num_steps
    if kept.path is None or kept.by == "prompt":
        return steps
    last = on_first_rank(layout, lambda: last_kept_step(kept.folder))
    if not last:
        raise ConfigError(f"rollout.kept.path: {kept.path} has rollouts of no step; use rollout.kept.by=prompt")
    return min(steps, kept.to_step or steps, last)


def leave_out_others(prompts: PromptOrder, kept: set[int]) -> None:
    """Leave out all rows but the `kept` ones. Raises ConfigError if no row is left."""
    try:
        prompts.leave_out({*range(len(prompts))} - kept)
    except ValueError as error:
        raise ConfigError(
            "rollout.kept.path: no row of data.train has kept rollouts; name rollouts of this data, whose prompt_id is "
            "the row's number"
        ) from error
