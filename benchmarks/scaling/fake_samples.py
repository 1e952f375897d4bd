"""Rollouts without an engine, for the benchmarks of what happens to them afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from megagrpo.types import Prompt, Rollout, SamplingParams, ScoredRollout

GROUP = 8


def prompts(samples: int) -> list[Prompt]:
    """Return the prompts of `samples` responses in groups of `GROUP`."""
    return [Prompt(i, tuple(range(16)), "What is it?", {"answer": "4"}, position=i) for i in range(samples // GROUP)]


def scored_group(prompt: Prompt, tokens: int) -> list[ScoredRollout]:
    """Return the responses to one prompt, of `tokens` tokens each, with arrays of their own and rewards 0 or 1."""
    draw = random.Random(prompt.prompt_id)
    group = []
    for number in range(GROUP):
        ids = np.arange(number, number + tokens, dtype=np.int32)
        reward = float(draw.randrange(2))
        rollout = Rollout(prompt, ids, ids.astype(np.float32) * -1e-6, "stop", 1, "word" * tokens)
        group.append(ScoredRollout(rollout, {"exact": reward}, reward))
    return group


class Engine:
    """Stands for the engine and the reward functions of a replica: its responses of `tokens` tokens exist already."""

    def __init__(self, asked: Sequence[Prompt], tokens: int):
        self.scored = {prompt.prompt_id: scored_group(prompt, tokens) for prompt in asked}

    def groups(
        self, asked: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """Yield the responses to each prompt."""
        yield from ((i, [s.rollout for s in self.scored[prompt.prompt_id]]) for i, prompt in enumerate(asked))

    def begin(self, step: int) -> Scores:
        """Begin to score one group."""
        return Scores(self)


class Scores:
    """The scores of one group."""

    def __init__(self, engine: Engine):
        self._engine, self._scored = engine, list[ScoredRollout]()

    def add(self, index: int, rollouts: Sequence[Rollout]) -> None:
        """Take the group."""
        self._scored = self._engine.scored[rollouts[0].prompt.prompt_id]

    def finish(self) -> list[ScoredRollout]:
        """Return the scored group."""
        return self._scored

    def counters(self) -> dict[str, float]:
        """Return no counters."""
        return {}
