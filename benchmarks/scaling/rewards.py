"""Reward calls: groups of long responses through a worker process, with a built-in function.

`in process` is the function alone. `in a worker` is what a step waits for: a call for each whole group, its arguments
as JSON through a socket, and the function. `short texts` are the same calls with responses of one digit, which leaves
the costs of a call itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.scaling.table import Point, Series, cpu_seconds
from megagrpo.config import RewardFunction, RewardsSection
from megagrpo.rewards.functions.text_rewards import exact_number
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Prompt, Rollout

WORDS = "so we add the two sides and get 12 = 3 * 4, which is even; now take x = 7 and let us check that again:".split()
GROUP, TOKENS = 8, 24_000
SAMPLES, OF = 800, 100_000


def response(tokens: int, number: int) -> str:
    """Return a text of about four characters a token, in lines of 20 words, that ends in `number`."""
    rng = random.Random(number)
    words = [rng.choice(WORDS) + ("\n" if i % 20 == 19 else "") for i in range(tokens)]
    return f"<think>{' '.join(words)}</think>The answer is {number}."


def rollouts(samples: int, tokens: int) -> list[Rollout]:
    """Return responses of prompts in groups. Few different texts: their scoring does not depend on it."""
    texts = [response(tokens, number) for number in range(4)] if tokens > 1 else ["0", "1", "2", "3"]
    ids, logprobs = np.arange(100_000, 100_000 + tokens, dtype=np.int32), np.zeros(tokens, dtype=np.float32)
    prompts = [Prompt(i, (1, 2), "What is it?", {"answer": str(i % 4)}) for i in range(samples // GROUP)]
    return [
        Rollout(p, ids, logprobs, "stop", 0, texts[(i + j) % 4]) for i, p in enumerate(prompts) for j in range(GROUP)
    ]


def series() -> Iterator[Series]:
    """Yield the reward calls of `SAMPLES` responses, and of `OF` from the same seconds per response."""
    function = RewardsSection(functions=[RewardFunction(function="exact_number")], workers=1)
    for kind, tokens in (f"{TOKENS:,} tokens", TOKENS), ("short texts", 1):
        asked = rollouts(SAMPLES, tokens)
        texts, golds = [r.text for r in asked], [r.prompt.columns["answer"] for r in asked]
        with RewardScorer(function, TOKENS) as scorer:
            scorer.score(asked[:GROUP])
            ways = {"in process": partial(exact_number, texts, golds), "in a worker": partial(scorer.score, asked)}
            for way, work in ways.items():
                wall, used = cpu_seconds(work)
                points = [Point(SAMPLES, wall), Point(OF, wall * OF / SAMPLES, computed=True)]
                note = f"{1e3 * wall / SAMPLES:.3f} ms a sample, {1e3 * used / SAMPLES:.3f} of the trainer's CPU"
                yield Series("rewards", f"exact_number {way}, {kind}", "samples", points, note)
