"""The turns of the trajectories of a step as a table, which every rank holds with `algorithm.advantage_by`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from megagrpo.types import Rollout

# one turn: 28 bytes. Turns of a trajectory are in order: those of its branches, then those of its rollout
TURN = np.dtype(
    [
        ("reward", "f8"),  # of a scheduler; NaN: none
        ("start", "i4"),  # its tokens are [start, stop) of the response of its sample
        ("stop", "i4"),
        ("sample", "i4"),  # of the trajectory: 0 is the rollout, then its branches
        ("state", "i8"),  # equal for equal tokens between the policy's turn before and this one
    ]
)


def turn_facts_of(rollouts: Sequence[Rollout]) -> np.ndarray:
    """Return the rows [k] of the turns of these trajectories."""
    rows = [
        (math.nan if turn.reward is None else turn.reward, turn.start, turn.stop, number, state)
        for rollout in rollouts
        for number, sample in [*enumerate(rollout.branches, 1), (0, rollout)]
        if sample.dialogue is not None
        for turn, state in zip(sample.dialogue.turns, _states(sample), strict=True)
    ]
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
