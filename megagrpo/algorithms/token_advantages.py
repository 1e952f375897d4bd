"""Advantages of tokens by process supervision (Shao et al. 2024, DeepSeekMath, section 4.1.3).

    A(token t) = A(trajectory) + token_advantage_weight * sum over t' >= t of (r(t') - mean) / std

r are the rewards that functions with `per: token` gave; a token without a reward adds nothing. Mean and unbiased
standard deviation are of all these rewards in all trajectories of the group (`scale_rewards: group`); with `none` only
the mean is subtracted. A(trajectory) is the advantage of all other rewards. The tokens of a trajectory are in the order
of `Rollout.samples`: those of its branches, then those of its rollout.

A group's trajectories are on the rank that sampled them, so only this rank needs the rewards of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import batched

import numpy as np

from megagrpo.algorithms.turn_advantages import compared_in_groups
from megagrpo.config import AlgorithmSection
from megagrpo.types import ScoredRollout

SUM_ROUNDING = 1e-9  # a sum of normalized rewards this close to 0 is 0: a sample may be skipped


def with_token_advantages(
    scored: Sequence[ScoredRollout], num_generations: int, algorithm: AlgorithmSection
) -> list[ScoredRollout]:
    """Return these trajectories of whole groups with what each token adds to its trajectory's advantage. Groups without
    rewards of tokens stay as they are."""
    changed: list[ScoredRollout] = []
    for group in batched(scored, num_generations):
        rows = [_in_order(s) for s in group]
        if not any(row.size for row in rows):
            changed += group
            continue
        returns = process_returns(rows, algorithm.scale_rewards == "group")
        for s, row in zip(group, returns, strict=True):
            own = (algorithm.token_advantage_weight * row).astype(np.float32)
            *branches, last = np.split(own, np.cumsum([len(r.response_ids) for r in s.rollout.branches]))
            changed.append(replace(s, token_advantages=(last, *branches) if own.size else ()))
    return changed


def process_returns(rows: Sequence[np.ndarray], scaled: bool) -> list[np.ndarray]:
    """Return for each token the sum of its own and all later normalized rewards, for the rewards [n] float64 of the
    tokens of each trajectory of a group; NaN: no reward."""
    joined = np.concatenate(rows)
    normalized = compared_in_groups(joined, np.zeros(joined.size, np.int64), scaled)
    returns = [part[::-1].cumsum()[::-1] for part in np.split(normalized, np.cumsum([row.size for row in rows])[:-1])]
    return [np.where(np.abs(row) <= SUM_ROUNDING, 0.0, row) for row in returns]


def _in_order(scored: ScoredRollout) -> np.ndarray:
    """Return the rewards [n] of the tokens of all samples of a trajectory; empty without any."""
    tokens = () if scored.parts is None else scored.parts.tokens
    return np.concatenate([np.zeros(0), *tokens[1:], *tokens[:1]])
