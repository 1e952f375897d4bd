"""Rewards and advantages of tokens, token by token, as `advantage_by` token and process define them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from megagrpo.proof.audit.naive_advantages import ROUNDING, STD_EPSILON
from megagrpo.proof.audit.saved import Step

NO_ADVANTAGE = 1e-9  # an advantage of a token this close to 0 is 0


def outcomes(step: Step) -> list[float]:
    """Return the reward of each trajectory that no token has; NaN without one."""
    return [float(s.text.get("outcome", s.text["reward"])) for s in step.trajectories]


def sums(step: Step) -> Iterator[tuple[float | None, float | None, str]]:
    """Yield dumped rewards, the sums that they must equal, and the place: the reward of a function per turn and the sum
    over turns, the trajectory's reward and the sum of its outcome and of its tokens' rewards."""
    for trajectory, indices in enumerate(step.samples_in_order):
        text = step.samples[indices[-1]].text
        for name, row in text.get("rewards_by_turn", {}).items():
            known = [reward for reward in row if reward is not None]
            yield text["rewards"][name], math.fsum(known) if known else None, f"sample {trajectory} {name} by turn"
        if step.config.algorithm.advantage_by_tokens:
            outcome = float(text.get("outcome", text["reward"]))
            known = [] if math.isnan(outcome) else [outcome]
            for index in indices:
                rewards = step.samples[index].token_rewards
                known += [] if rewards is None else rewards[~rewards.isnan()].tolist()
            total = math.fsum(known) if known else math.nan
            yield float(text["reward"]), total, f"sample {trajectory} by token"


def token_advantages(step: Step, advantages: Sequence[float]) -> list[Tensor]:
    """Return the advantage [L] float64 of each token of each sample: the trajectory's of `advantages`, and its own."""
    algorithm, order = step.config.algorithm, step.samples_in_order
    scaled, weight = algorithm.scale_rewards == "group", algorithm.token_advantage_weight
    rows = [torch.full((sample.length,), advantages[sample.trajectory]).double() for sample in step.samples]
    for group in ([order[i] for i in members] for members in step.groups):
        places = [_written(step, indices) for indices in group]
        rewards = [[_reward(step, *place) for place in of_trajectory] for of_trajectory in places]
        own = (_compared if algorithm.advantage_by == "token" else _process)(rewards, scaled)
        for (index, token), value in zip(chain(*places), chain(*own), strict=True):
            rows[index][token] += weight * value if abs(value) > NO_ADVANTAGE else 0.0
    return rows


def _compared(group: list[list[float]], scaled: bool) -> list[list[float]]:
    """Return the sum of the rewards from each token on, compared with that of tokens with as many rewards before."""
    returns: list[dict[int, float]] = []  # by the number of rewards before, for each trajectory
    for rewards in group:
        later, count, found = 0.0, sum(not math.isnan(r) for r in rewards), dict[int, float]()
        for reward in reversed(rewards):
            if not math.isnan(reward):
                later, count = later + reward, count - 1
            found[count] = later
        returns.append(found)
    among = defaultdict(list)
    for count, value in chain.from_iterable(found.items() for found in returns):
        among[count].append(value)
    normalizers = {count: _normalizer(values, scaled) for count, values in among.items()}
    result: list[list[float]] = []
    for rewards, found in zip(group, returns, strict=True):
        count, own = 0, []
        for reward in rewards:
            own.append(normalizers[count](found[count]))
            count += not math.isnan(reward)
        result.append(own)
    return result


def _process(group: list[list[float]], scaled: bool) -> list[list[float]]:
    """Return the sum of the normalized rewards from each token on."""
    normalized = _normalizer([r for rewards in group for r in rewards if not math.isnan(r)], scaled)
    result: list[list[float]] = []
    for rewards in group:
        later, own = 0.0, list[float]()
        for reward in reversed(rewards):
            later += 0.0 if math.isnan(reward) else normalized(reward)
            own.append(later)
        result.append(own[::-1])
    return result


def _normalizer(values: list[float], scaled: bool) -> Callable[[float], float]:
    """Return the function that subtracts the mean of `values` and, if `scaled`, divides by their unbiased standard
    deviation. A difference by rounding, and one from a single value, is 0."""
    mean, largest = statistics.fmean(values) if values else 0.0, max(1.0, *map(abs, values), 1.0)
    scale = statistics.stdev(values) + STD_EPSILON if scaled and len(values) > 1 else 1.0
    return lambda value: (value - mean) / scale if abs(value - mean) > ROUNDING * largest else 0.0


def _written(step: Step, indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return (sample, token) of the policy's tokens of a trajectory; none if none of them has a reward."""
    places = [(index, token) for index in indices for token in step.samples[index].places.tolist()]
    return places if any(not math.isnan(_reward(step, *place)) for place in places) else []


def _reward(step: Step, index: int, token: int) -> float:
    rewards = step.samples[index].token_rewards
    return math.nan if rewards is None else float(rewards[token])
