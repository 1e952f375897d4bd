"""The turns of the trajectories of a step as a table, which every rank holds with `algorithm.advantage_by`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import islice

import numpy as np

from megagrpo.types import Rollout, ScoredRollout

# one turn: 28 bytes. Turns of a trajectory are in order: those of its branches, then those of its rollout
TURN = np.dtype(
    [
        ("reward", "f8"),  # of a scheduler and of functions per turn; NaN: none
        ("start", "i4"),  # its tokens are [start, stop) of the response of its sample
        ("stop", "i4"),
        ("sample", "i4"),  # of the trajectory: 0 is the rollout, then its branches
        ("state", "i8"),  # equal for equal tokens between the policy's turn before and this one
    ]
)


def turn_facts_of(scored: Sequence[ScoredRollout]) -> np.ndarray:
    """Return the rows [k] of the turns of these trajectories."""
    rows = []
    for s in scored:
        rewards = iter(s.turn_rewards)
        for number, sample in [*enumerate(s.rollout.branches, 1), (0, s.rollout)]:
            states = [] if sample.dialogue is None else _states(sample)
            own = [math.nan if reward is None else reward for reward in islice(rewards, len(sample.turns))]
            columns = zip(own, sample.turns, states, strict=sample.dialogue is not None)
            rows += [(reward, turn.start, turn.stop, number, state) for reward, turn, state in columns]
    return np.array(rows, TURN)


def _states(sample: Rollout) -> list[int]:
    """Return the 63-bit key of the observation before each turn: what others wrote since the policy's turn before. That
    of the first turn has the prompt, too."""
    assert sample.dialogue is not None, "a sample without a dialogue has no turns"
    before, keys = 0, []
    for number, turn in enumerate(sample.dialogue.turns):
        observed = sample.response_ids[before : turn.start].tolist()
        contents = ([] if number else list(sample.prompt.token_ids)) + observed
        seen = np.array([bool(number), *contents], np.int32).tobytes()
        keys.append(int.from_bytes(hashlib.blake2b(seen, digest_size=8).digest(), "big") >> 1)
        before = turn.stop
    return keys
