"""Advantages of tokens, from the rewards r that functions with `per: token` gave to tokens of a group's trajectories.

    A(token t) = A(trajectory) + token_advantage_weight * A_token(t)

`advantage_by: token`: A_token compares G(t), the sum of r from t on, without a discount. A token with k rewards before
it is compared with the tokens with k rewards before them, one of each trajectory of the group that has one. With a
reward at each token these are the tokens with the same number. A token that no reward follows has G = 0. The baseline
depends on what is before t only, so it does not bias the gradient, whenever the policy ends.

`advantage_by: process` (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, section 4.1.3): A_token is the sum from t on
of (r - mean) / std over all rewards of the group. The number of subtracted means depends on when the policy ends, which
adds -mean / std to the value of each further reward.

Both divide by the unbiased standard deviation of the compared values (`scale_rewards: group`), or by nothing (`none`).
A(trajectory) is the advantage of all other rewards. The tokens of a trajectory are in the order of `Rollout.samples`:
those of its branches, then those of its rollout. A group's trajectories are on the rank that sampled them, so only
this rank needs the rewards of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megagrpo.algorithms.turn_advantages import compared_in_groups
from megagrpo.config import AlgorithmSection
from megagrpo.types import ScoredRollout

ADVANTAGE_ROUNDING = 1e-9  # an advantage this close to 0 is 0: its sample may be skipped


def with_token_advantages(
    scored: Sequence[ScoredRollout], num_generations: int, algorithm: AlgorithmSection
) -> list[ScoredRollout]:
    """Return these trajectories of whole groups with what each token adds to its trajectory's advantage. Groups without
    rewards of tokens stay as they are."""
    changed: list[ScoredRollout] = []
    while len(changed) < len(scored):
        first = len(changed)
        group = scored[first : first + scored[first].rollout.prompt.group_size(num_generations)]
        rows = [_in_order(s) for s in group]
        if not any(row.size for row in rows):
            changed += group
            continue
        compared = compared_returns if algorithm.advantage_by == "token" else process_returns
        own_advantages = compared(rows, algorithm.scale_rewards == "group")
        for s, row in zip(group, own_advantages, strict=True):
            own = (algorithm.token_advantage_weight * row).astype(np.float32)
            changed.append(replace(s, token_advantages=s.rollout.spread(own, 0.0)) if row.size else s)
    return changed


def compared_returns(rows: Sequence[np.ndarray], scaled: bool) -> list[np.ndarray]:
    """Return A_token of `advantage_by: token`, for the rewards [n] float64 of the tokens of each trajectory of a group;
    NaN: no reward."""
    before = [np.cumsum(known) - known for known in (~np.isnan(row) for row in rows)]  # rewards before each token
    returns = [np.nan_to_num(row)[::-1].cumsum()[::-1] for row in rows]
    firsts = [np.flatnonzero(np.diff(counts, prepend=-1)) for counts in before]  # tokens with one value of `before`
    values = [row[first] for row, first in zip(returns, firsts, strict=True)]
    groups = np.concatenate([np.arange(first.size) for first in firsts])
    compared = np.split(compared_in_groups(np.concatenate(values), groups, scaled), _borders(values))
    return [_rounded(part[counts]) for part, counts in zip(compared, before, strict=True)]


def process_returns(rows: Sequence[np.ndarray], scaled: bool) -> list[np.ndarray]:
    """Return A_token of `advantage_by: process`, for the rewards [n] float64 of the tokens of each trajectory of a
    group; NaN: no reward."""
    joined = np.concatenate(rows)
    normalized = compared_in_groups(joined, np.zeros(joined.size, np.int64), scaled)
    return [_rounded(part[::-1].cumsum()[::-1]) for part in np.split(normalized, _borders(rows))]


def _borders(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum([row.size for row in rows])[:-1]


def _rounded(row: np.ndarray) -> np.ndarray:
    return np.where(np.abs(row) <= ADVANTAGE_ROUNDING, 0.0, row)


def _in_order(scored: ScoredRollout) -> np.ndarray:
    """Return the rewards [n] of the tokens that the policy wrote in all samples of a trajectory; empty without any."""
    tokens = () if scored.parts is None else scored.parts.tokens
    rows = zip([*tokens[1:], *tokens[:1]], scored.rollout.samples, strict=bool(tokens))
    joined = np.concatenate([np.zeros(0), *(row[sample.written] for row, sample in rows)])
    return joined[:0] if np.isnan(joined).all() else joined
