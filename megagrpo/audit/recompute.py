"""A dumped step once more, from its tokens and rewards to its gradient norm, through `naive`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megagrpo.audit import naive
from megagrpo.audit.saved import Step


@dataclass
class Recomputed:
    """One optimizer step. Rows [Lr] float64 over the tokens that the policy wrote of each sample, None for samples that teach nothing."""

    policy_logprobs: list[Tensor | None] = field(default_factory=list)
    old_logprobs: list[Tensor | None] = field(default_factory=list)
    ref_logprobs: list[Tensor | None] = field(default_factory=list)
    entropy: list[Tensor | None] = field(default_factory=list)
    kl: list[Tensor | None] = field(default_factory=list)
    loss: float = 0.0
    loss_size: float = 0.0  # as `loss`, of the terms' absolute values: what its rounding is measured by
    grad_norm: float = 0.0


def recompute(step: Step, advantages: list[float]) -> Iterator[Recomputed]:
    """Every optimizer step of `step`, with `advantages` of its samples. Two models of float64 are in memory at most, and one gradient."""
    reference = naive.load_model(step.model, step.dtype).requires_grad_(False) if step.config.algorithm.beta else None
    first: Recomputed | None = None
    for update in step.updates:
        result = _recompute_update(step, advantages, naive.load_model(update.weights, step.dtype), reference, first)
        first = first or result
        yield result


def _recompute_update(
    step: Step, advantages: list[float], model: nn.Module, reference: nn.Module | None, first: Recomputed | None
) -> Recomputed:
    algorithm, rollout = step.config.algorithm, step.config.rollout
    divisor = naive.denominator(step.loss_lengths, algorithm.loss_type, rollout.max_completion_length)
    slope = _balancing_slope(step, model) if algorithm.router_aux_loss_coef else None
    result = Recomputed()
    for index, (sample, advantage) in enumerate(zip(step.samples, advantages, strict=True)):
        if step.is_masked(sample) or (advantage == 0 and reference is None and slope is None):  # every term of its loss is 0
            _append(result, None, None, None, None, None)
            continue
        picked = sample.token_ids[sample.places]
        policy = naive.log_softmax(model, sample.token_ids, rollout.temperature)[sample.places - 1]
        logprobs = policy.gather(1, picked[:, None])[:, 0]
        old = logprobs.detach() if first is None else first.policy_logprobs[index]
        losses = naive.token_losses(logprobs, old, advantage, algorithm)
        ref_picked = kl = None
        if reference is not None:
            with torch.no_grad():
                ref = naive.log_softmax(reference, sample.token_ids, rollout.temperature)[sample.places - 1]
            ref_picked = ref.gather(1, picked[:, None])[:, 0]
            kl = naive.kl_term(policy, ref, picked, (logprobs - old).exp(), algorithm)
            losses = losses + algorithm.beta * kl
        share = divisor * (losses.numel() if algorithm.loss_type == "grpo" else 1)
        loss = losses.sum() / share
        loss.backward()
        if slope is not None:
            (naive.router_probabilities(model, sample.token_ids, sample.places) @ slope).sum().backward()
        result.loss += loss.item()
        result.loss_size += losses.detach().abs().sum().item() / share
        entropy = -(policy.exp() * policy).sum(dim=-1)
        _append(result, logprobs, old, ref_picked, entropy, kl)
    squares = [parameter.grad.square().sum().item() for parameter in model.parameters() if parameter.grad is not None]
    result.grad_norm = sum(squares) ** 0.5
    return result


@torch.no_grad()
def _balancing_slope(step: Step, model: nn.Module) -> Tensor:
    """What the balancing loss adds to the gradient by each probability of a router, [E]."""
    rows = [naive.router_probabilities(model, sample.token_ids, sample.places) for sample in step.samples if not step.is_masked(sample)]
    return step.config.algorithm.router_aux_loss_coef * naive.balancing_slope(torch.cat(rows), model.config.num_experts_per_tok)


def _append(result: Recomputed, *rows: Tensor | None) -> None:
    names = ("policy_logprobs", "old_logprobs", "ref_logprobs", "entropy", "kl")
    for name, row in zip(names, rows, strict=True):
        getattr(result, name).append(None if row is None else row.detach())
