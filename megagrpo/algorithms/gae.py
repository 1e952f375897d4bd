"""Generalized advantage estimation from a critic's values (Schulman et al. 2016, arXiv 1506.02438), and the critic's
loss (Schulman et al. 2017, arXiv 1707.06347).

The tokens of one sequence are its loss tokens, in order; tokens of an environment between them take no time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.config import AlgorithmSection
from megagrpo.train_types import LossFn, LossInputs, LossOutput, Metric, MicroBatch

LEAST_VARIANCE = 1e-8  # added to the variance of the advantages that are scaled


@dataclass(frozen=True)
class Estimates:
    """The targets of one micro-batch, 0 where the loss mask is 0."""

    advantages: Tensor  # [T] float32
    returns: Tensor  # [T] float32, what the values should have been


def turn_ends(micro_batch: MicroBatch) -> Tensor:
    """[T] bool: the last token of each run of loss tokens in a sequence, which is a turn of the policy."""
    mask, owner = micro_batch.loss_mask, micro_batch.sequence_index
    goes_on = torch.zeros_like(mask)
    goes_on[:-1] = mask[1:] & (owner[1:] == owner[:-1])
    return mask & ~goes_on


def last_tokens(micro_batch: MicroBatch) -> Tensor:
    """[T] bool: the last loss token of each sequence."""
    mask, owner = micro_batch.loss_mask, micro_batch.sequence_index
    positions = torch.arange(len(mask), device=mask.device)
    last = torch.full((micro_batch.num_sequences,), -1, device=mask.device)
    return mask & (last.scatter_reduce(0, owner[mask], positions[mask], "amax")[owner] == positions)


def estimates(micro_batch: MicroBatch, rewards: Tensor, values: Tensor, algorithm: AlgorithmSection) -> Estimates:
    """Return the estimates for `rewards` [T] that tokens earned and a critic's `values` [T].

    advantage(t) = delta(t) + gamma lambda advantage(t + 1), delta(t) = reward(t) + gamma value(t + 1) - value(t). With
    `advantage_by` turn, gamma and lambda count turns: both are 1 inside a turn. The critic's returns use
    `critic.critic_lambda`, and with `critic.length_adaptive_alpha` the policy's lambda is 1 - 1 / (alpha l) for
    a response of l tokens, or turns (VAPO, arXiv 2504.05118).
    """
    critic, mask = algorithm.critic, micro_batch.loss_mask
    owner = micro_batch.sequence_index[mask]
    sequences, lengths = owner.unique_consecutive(return_counts=True)
    rows = torch.arange(len(sequences), device=owner.device).repeat_interleave(lengths)
    columns = torch.arange(len(owner), device=owner.device) - (lengths.cumsum(0) - lengths)[rows]
    table = torch.zeros(3, len(sequences), int(lengths.max()) + 1 if len(lengths) else 1, device=owner.device)
    steps = turn_ends(micro_batch)[mask] if algorithm.advantage_by_turns else torch.ones_like(owner, dtype=torch.bool)
    table[:, rows, columns] = torch.stack([rewards[mask], values[mask], steps.float()]).to(table.dtype)
    policy_lambda = torch.full((len(sequences),), critic.gae_lambda, device=owner.device)
    if critic.length_adaptive_alpha is not None:
        policy_lambda = (1 - 1 / (critic.length_adaptive_alpha * table[2].sum(dim=1))).clamp(min=0)
    critic_lambda = critic.gae_lambda if critic.critic_lambda is None else critic.critic_lambda
    found = []
    for lambdas in (policy_lambda, torch.full_like(policy_lambda, critic_lambda)):
        of_tokens = advantages(table[0].double(), table[1].double(), table[2], critic.gamma, lambdas.double())
        found.append(torch.zeros_like(rewards, dtype=torch.float32))
        found[-1][mask] = of_tokens[rows, columns].float()
    return Estimates(found[0], found[1] + torch.where(mask, values, 0.0))


def advantages(rewards: Tensor, values: Tensor, steps: Tensor, gamma: float, lambdas: Tensor) -> Tensor:
    """Return the advantages [S, L] of S sequences of at most L - 1 tokens, padded with 0. `steps` [S, L] is 1 where
    gamma and the sequence's lambda [S] apply between a token and the next one, and 0 where both are 1."""
    result, last = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 2, -1, -1):
        discount = gamma ** steps[:, t]
        delta = rewards[:, t] + discount * values[:, t + 1] - values[:, t]
        last = delta + discount * lambdas ** steps[:, t] * last
        result[:, t] = last
    return result


def mean_and_scale(count: float, total: float, squares: float) -> tuple[float, float]:
    """Return the mean and the scale of numbers with these sums: their standard deviation, which is at least 1e-4, so
    that advantages that differ by rounding alone stay small."""
    mean = total / max(count, 1)
    return mean, (max(squares / max(count, 1) - mean**2, 0.0) + LEAST_VARIANCE) ** 0.5


def make_value_loss(clip: float | None) -> LossFn:
    """Return the critic's loss: half the squared error of the values, or the larger one of that and of the values that
    moved by at most `clip` from those before the step."""

    def loss(inputs: LossInputs) -> LossOutput:
        mask, values, terms = inputs.micro_batch.loss_mask, inputs.policy_logprobs, inputs.micro_batch.terms
        assert terms.values is not None and terms.returns is not None, "the batch has no estimates"
        errors = (values - terms.returns).square()
        metrics = {}
        if clip is not None:
            clipped = (terms.values + (values - terms.values).clamp(-clip, clip) - terms.returns).square()
            chosen = clipped > errors
            metrics["critic/clip_ratio"] = Metric(chosen[mask].sum(), mask.sum())
            errors = torch.where(chosen, clipped, errors)
        return LossOutput((0.5 * errors)[mask].sum(), metrics)

    return loss
