"""The loss of one response in float64, as in the papers: every built-in loss, ratio, mask and correction. Values that
depend on other responses come in as `WholeStep`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.algorithms.custom_loss import load_policy_term
from megagrpo.algorithms.policy_losses import Tokens
from megagrpo.algorithms.sequences import Sequences
from megagrpo.config import AlgorithmSection, ConfigError, ProblemError, RunConfig
from megagrpo.config.sections.loss_table import Average


@dataclass(frozen=True)
class Response:
    """The policy's tokens of one response, [Lr] each. Log-probs and entropy of the policy carry a gradient."""

    logprobs: Tensor
    old: Tensor  # log-probs of the policy that sampled it
    rollout: Tensor  # the engine's log-probs, NaN where it reported none
    entropy: Tensor
    places: Tensor  # positions of the tokens
    advantage: Tensor  # of each token


@dataclass
class WholeStep:
    """Values that a response's loss takes from the other responses of its optimizer step."""

    entropy_threshold: float = -math.inf  # tokens with less entropy are left out of the policy term
    bonus: float = 0.0  # weight of a token's entropy, subtracted from the step's loss


def policy_term(of: Response, algorithm: AlgorithmSection, threshold: float) -> Tensor:
    """Return [Lr]: the policy term of each token of a response."""
    losses = (_custom if algorithm.loss.custom else TERMS[algorithm.loss.policy_term])(of, algorithm)
    if algorithm.off_policy_mask_threshold is not None and (of.advantage < 0).any():
        if left_behind(of, algorithm) > algorithm.off_policy_mask_threshold:
            losses = losses * 0
    losses = losses * (of.entropy >= threshold)
    if algorithm.importance_correction != "off" and not algorithm.loss.own_correction:
        losses = losses * correction(of, algorithm)
    return losses


def left_behind(of: Response, algorithm: AlgorithmSection) -> float:
    """Return how far the policy has moved from the response: mean log(sampled / policy)."""
    sampled = of.old if algorithm.importance_correction == "off" else of.rollout
    return torch.where(sampled.isnan(), 0.0, sampled - of.logprobs).mean().item()


def weights_of_tasks(
    lengths: Mapping[tuple[int, str], int], task_of: Callable[[int], str], config: RunConfig
) -> dict[str, float]:
    """Return the weight of each task's tokens in the loss, from the loss tokens of each sequence of the step."""
    factors = {task.name: task.loss_weight for task in config.each_task}
    by, tokens = config.algorithm.loss_share_of_tasks, config.algorithm.loss.average == "tokens"
    of_tasks = [(task_of(trajectory), trajectory, n if tokens else 1) for (trajectory, _), n in lengths.items()]
    parts = {name: [part for task, _, part in of_tasks if task == name] for name in factors}
    prompts = {name: len({trajectory for task, trajectory, _ in of_tasks if task == name}) for name in factors}
    whole = sum(map(sum, parts.values()))
    shares = dict[str, float]()
    for name, own in parts.items():
        of_task = {"tasks": 1.0, "prompts": prompts[name] / config.group_sizes[name]}.get(by or "", sum(own))
        shares[name] = factors[name] * of_task if sum(own) else 0.0
    total = sum(shares.values())
    return {name: share / total * whole / sum(parts[name]) if share else 0.0 for name, share in shares.items()}


def share(average: Average, length: int) -> int:
    """Return the divisor of a response's tokens before the step's denominator, given its length."""
    return length if average == "sequence_means" else 1


def denominator(response_lengths: Sequence[int], average: Average, max_completion_length: int) -> int:
    """Return the divisor of the sum over the step."""
    if average == "tokens":
        return max(1, sum(response_lengths))
    return max(1, len(response_lengths)) * (max_completion_length if average == "fixed_length" else 1)


def probability_ratio(log_ratio: Tensor, level: str) -> Tensor:
    """Return [Lr]: policy / old of every token, or the response's geometric mean for all tokens (GSPO).

    With `sequence_token` each token has the geometric mean as value and the gradient of its own ratio.
    """
    if level == "token":
        return log_ratio.exp()
    mean = log_ratio.mean().expand_as(log_ratio)
    return mean.exp() if level == "sequence" else mean.detach().exp() * (log_ratio - log_ratio.detach()).exp()


def correction(of: Response, algorithm: AlgorithmSection) -> Tensor:
    """Return [Lr]: each token's weight for the engine mismatch, trainer / engine, limited to the configured band."""
    level, action = algorithm.importance_correction.split("_")
    low = algorithm.importance_correction_min or 0.0
    high = algorithm.importance_correction_max or math.inf
    log_ratio = torch.where(of.rollout.isnan(), 0.0, of.old - of.rollout)
    log_ratio = {"token": log_ratio, "sequence": log_ratio.sum(), "geometric": log_ratio.mean()}[level].expand_as(
        log_ratio
    )
    ratios = [math.exp(min(max(value, -20.0), 20.0)) for value in log_ratio.tolist()]
    inside = [low <= ratio <= high for ratio in ratios]
    weights = {
        "truncate": [min(max(ratio, low), high) for ratio in ratios],
        "mask": [ratio if good else 0.0 for ratio, good in zip(ratios, inside, strict=True)],
        "reject": [float(all(inside))] * len(ratios),
    }[action]
    return torch.tensor(weights, dtype=torch.float64)


def clipped(of: Response, algorithm: AlgorithmSection) -> Tensor:
    """[Lr]: -min(min(r, delta) A, clip(r) A)."""
    ratio = probability_ratio(of.logprobs - of.old, algorithm.importance_sampling_level)
    clip = ratio.clamp(1 - algorithm.epsilon, 1 + _upper(algorithm))
    bounded = ratio if algorithm.delta is None else torch.where(ratio > algorithm.delta, algorithm.delta, ratio)
    return -torch.minimum(bounded * of.advantage, clip * of.advantage)


def cispo(of: Response, algorithm: AlgorithmSection) -> Tensor:
    """[Lr]: -min(r, epsilon_high) A log policy, the weight without gradient."""
    ratio = probability_ratio(of.logprobs - of.old, algorithm.importance_sampling_level).detach()
    return -torch.where(ratio > _upper(algorithm), _upper(algorithm), ratio) * of.advantage * of.logprobs


def sapo(of: Response, algorithm: AlgorithmSection) -> Tensor:
    """[Lr]: -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A."""
    tau = torch.where(of.advantage > 0, algorithm.sapo_temperature_pos, algorithm.sapo_temperature_neg)
    ratio = probability_ratio(of.logprobs - of.old, algorithm.importance_sampling_level)
    return -of.advantage * (4 / tau) / (1 + (-tau * (ratio - 1)).exp())


def vespo(of: Response, algorithm: AlgorithmSection) -> Tensor:
    """[Lr]: -e^lambda W^k e^(-lambda W) A log policy, W the weight of the whole response, without gradient."""
    floor = math.log(1e-8)
    log_weight = sum(min(max(value, -20.0), 20.0) for value in (of.logprobs - of.old).tolist())
    if algorithm.importance_correction != "off":
        log_weight += sum(
            min(max(math.log(w), floor), 20.0) if w else floor for w in correction(of, algorithm).tolist()
        )
    log_weight = min(max(log_weight, floor), 20.0)
    positive, negative = (
        math.exp(max(scale + k * log_weight - scale * math.exp(log_weight), -700.0))
        for k, scale in (
            (algorithm.vespo_k_pos, algorithm.vespo_lambda_pos),
            (algorithm.vespo_k_neg, algorithm.vespo_lambda_neg),
        )
    )
    return -torch.where(of.advantage >= 0, positive, negative) * of.advantage * of.logprobs


def gmpo(of: Response, algorithm: AlgorithmSection) -> Tensor:
    """[Lr]: -exp(mean of the clipped log-ratios) A, the same at every token."""
    log_ratio = of.logprobs - of.old
    clip = log_ratio.clamp(-algorithm.epsilon, _upper(algorithm))
    mean = torch.where(of.advantage > 0, torch.minimum(log_ratio, clip), torch.maximum(log_ratio, clip)).mean()
    return (-mean.exp() * of.advantage).expand_as(log_ratio)


def fipo(of: Response, algorithm: AlgorithmSection) -> Tensor:
    """[Lr]: the clipped losses, each weighted by how much likelier its later tokens have become."""
    log_ratio, span = (of.logprobs - of.old).tolist(), algorithm.fipo_clip_range
    weights = []
    for t, here in enumerate(of.places.tolist()):
        future = 0.0
        for there, value in zip(of.places.tolist()[t:], log_ratio[t:], strict=True):
            if algorithm.delta is None or math.exp(value) <= algorithm.delta:
                future += 2 ** (-(there - here) / algorithm.fipo_decay_rate) * value
        low, high = (1.0 if algorithm.fipo_clip_high_only else 1 - span), 1 + span
        limit = algorithm.fipo_safety_threshold
        if limit is not None and of.advantage[t] < 0 and math.exp(log_ratio[t]) > limit:
            low, high = 1 - span, 1.0
        weights.append(min(max(math.exp(future), low), high))
    return torch.tensor(weights, dtype=torch.float64) * clipped(of, algorithm)


def _custom(of: Response, algorithm: AlgorithmSection) -> Tensor:
    """[Lr]: the policy term of the user's own loss. It has no second formula, so the audit runs the user's function
    again, in float64 and one response at a time. That checks everything around the formula, and not the formula."""
    ratio = probability_ratio(of.logprobs - of.old, algorithm.importance_sampling_level)
    weights = correction(of, algorithm) if algorithm.importance_correction != "off" else None
    length = of.logprobs.numel()
    sequences = Sequences.of(torch.tensor([0, length]), torch.ones(length, dtype=torch.bool))
    tokens = Tokens(of.logprobs, of.old, ratio, of.advantage, sequences, weights)
    return load_policy_term(algorithm)(tokens, algorithm)


TERMS = {term.__name__: term for term in (clipped, cispo, sapo, vespo, gmpo, fipo)}


def _upper(algorithm: AlgorithmSection) -> float:
    return algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high


def top_threshold(entropies: Sequence[float], top: float) -> float:
    """Return the entropy that the `top` share of tokens reach: a quantile, linear between the two nearest tokens, less
    1e-5 nats, so that tokens that tie at it are all counted."""
    ordered = sorted(entropies)
    position = (1 - top) * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below]) - 1e-5


def check_custom_loss(algorithm: AlgorithmSection) -> None:
    """Raise ConfigError when the run's loss is the user's own and cannot be loaded any longer."""
    if not algorithm.loss.custom:
        return
    try:
        load_policy_term(algorithm)
    except ProblemError as error:
        raise ConfigError(f"{error}; the audit runs the loss of the run again: put its file back there") from error


def note(algorithm: AlgorithmSection) -> str:
    """Return what the audit says of a loss of the user's own; empty for others."""
    return f"{algorithm.loss_type} run again in float64; its formula is not checked" if algorithm.loss.custom else ""
