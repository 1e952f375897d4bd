"""The critic of a dumped step in float64: its values by transformers' model, generalized advantage estimation token by
token, and the gradient of its loss."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megagrpo.proof.audit import naive
from megagrpo.proof.audit.audit_compare import SUMMING_TOLERANCE, Check, compare, named
from megagrpo.proof.audit.dumped_rows import Rows
from megagrpo.proof.audit.naive_turns import turns_of
from megagrpo.proof.audit.recompute import balancing_slope, dumped_columns, model_of, router_logits
from megagrpo.proof.audit.saved import DumpedUpdate, Sample, Step
from megagrpo.proof.audit.tolerances import TOLERANCES


@dataclass(frozen=True)
class Critic:
    """The critic before an optimizer step: transformers' model, and the weight [H] of its head, in float64."""

    model: nn.Module
    head: Tensor

    def values(self, step: Step, sample: Sample) -> Tensor:
        """Return [Lr]: the head times what the LM head would read before each of the policy's tokens."""
        states: list[Tensor] = []
        lm_head: nn.Module = self.model.get_output_embeddings()  # type: ignore[operator]
        hook = lm_head.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
        self.model(sample.token_ids[None], **naive.image_inputs(step.model, self.model, sample))
        hook.remove()
        return states[0][0, sample.places - 1] @ self.head


def critic_of(step: Step, update: DumpedUpdate) -> Critic:
    """Return the critic before an optimizer step."""
    folder = step.folder / f"critic_{update.number}"
    head = load_file(folder / "score.safetensors")["score.weight"][0].double()
    return Critic(model_of(step, folder, step.critic), head.requires_grad_())


def check_critic(step: Step, rewards: Sequence[float], rows: Sequence[Rows]) -> Generator[Check, None, list[Tensor]]:
    """Yield the checks of values, returns, advantages and of each of the critic's optimizer steps, of trajectories
    with these rewards. Returns the advantages [L] of each sample, which follow from the dumped values."""
    step = replace(step, samples=[replace(sample, routes=None) for sample in step.samples])  # routes of the policy
    tolerances, first = TOLERANCES[step.dtype], critic_of(step, step.updates[0])
    with torch.no_grad():
        values = [None if step.is_masked(s) else first.values(step, s) for s in step.samples]
    size = torch.cat([row.abs() for row in values if row is not None]).mean().item()
    dumped = dumped_columns(step, step.updates, "values")
    advantages, returns = map(list, zip(*_estimates(step, rewards, dumped), strict=True))
    if step.config.algorithm.scale_rewards != "none":
        counted = [row for row, s in zip(advantages, step.samples, strict=True) if not step.is_masked(s)]
        every = torch.cat(counted)
        scale = (every.var(unbiased=False) + 1e-8).sqrt()
        advantages = [(row - every.mean()) / scale for row in advantages]
    for of in rows:
        limits = tolerances.token, tolerances.average * size, size
        yield named(of.compare("values", "values", values, *limits), step, of.update)
        yield named(of.compare("returns", "returns", returns, SUMMING_TOLERANCE), step, of.update)
        yield named(of.compare("advantages in the batch", "advantage", advantages, SUMMING_TOLERANCE), step, of.update)
    means = [math.nan] * len(step.trajectories)
    for i, of_trajectory in enumerate(step.samples_in_order):
        tokens = [advantages[k] for k in of_trajectory if not step.is_masked(step.samples[k])]
        means[i] = torch.cat(tokens).mean().item() if tokens and torch.cat(tokens).numel() else 0.0
    shown = [float(s.text["advantage"]) for s in step.trajectories]
    yield compare("mean advantages", shown, means, SUMMING_TOLERANCE, lambda i: f"trajectory {i}")
    for update in step.updates:
        for check in _check_update(step, update, dumped, returns):
            yield named(check, step, update)
    whole = [torch.zeros(sample.length).double() for sample in step.samples]
    return [row.index_copy(0, s.places, a) for row, s, a in zip(whole, step.samples, advantages, strict=True)]


def _estimates(step: Step, rewards: Sequence[float], values: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (advantages, returns), [Lr] each, of every sample, whose tokens have these values [Lr]."""
    algorithm, critic = step.config.algorithm, step.config.algorithm.critic
    kl = [torch.zeros_like(row) for row in values]
    if algorithm.kl_in_reward:
        old, ref = (dumped_columns(step, step.updates, name) for name in ("old_logprobs", "ref_logprobs"))
        kl = [algorithm.beta * (one - other) for one, other in zip(old, ref, strict=True)]
    for (earned, moves), of_kl, row in zip(_earned(step, rewards), kl, values, strict=True):
        weight = critic.gae_lambda
        if critic.length_adaptive_alpha is not None:
            weight = max(0.0, 1 - 1 / (critic.length_adaptive_alpha * max(sum(moves), 1)))
        own = weight, critic.gae_lambda if critic.critic_lambda is None else critic.critic_lambda
        of = (torch.tensor(earned).double() - of_kl).tolist(), row.tolist(), moves, critic.gamma
        yield gae(*of, own[0]), gae(*of, own[1]) + row


def _earned(step: Step, rewards: Sequence[float]) -> Iterator[tuple[list[float], list[bool]]]:
    """Yield for every sample what each of its tokens earns, and whether gamma and lambda apply after it."""
    by_turns = step.config.algorithm.advantage_by_turns
    turns = turns_of(step) if by_turns else []
    for index, sample in enumerate(step.samples):
        places, total = sample.places.tolist(), rewards[sample.trajectory]
        ends = {places[-1]: total} if places else {}
        if by_turns:
            of_turns = [0.0 if turn.reward is None else turn.reward for turn in turns[sample.trajectory]]
            of_turns[-1:] = [of_turns[-1] + total - sum(of_turns)] if of_turns else []
            pairs = zip(turns[sample.trajectory], of_turns, strict=True)
            ends = {turn.stop - 1: reward for turn, reward in pairs if turn.sample == index}
        earned = [0.0 if math.isnan(reward := ends.get(place, 0.0)) else reward for place in places]
        yield earned, [not by_turns or place in ends for place in places]


def gae(
    rewards: Sequence[float], values: Sequence[float], moves: Sequence[bool], gamma: float, weight: float
) -> Tensor:
    """Return the advantages [L]: delta(t) + gamma lambda advantage(t + 1), with both factors 1 after a token that does
    not move time."""
    found, later, following = [0.0] * len(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        discount, decay = (gamma, weight) if moves[t] else (1.0, 1.0)
        later = rewards[t] + discount * following - values[t] + discount * decay * later
        found[t], following = later, values[t]
    return torch.tensor(found, dtype=torch.float64)


def _check_update(
    step: Step, update: DumpedUpdate, before: Sequence[Tensor], returns: Sequence[Tensor]
) -> Iterator[Check]:
    """Yield the checks of the critic's loss and of the norm of its gradient in one optimizer step."""
    algorithm, tolerances, critic = step.config.algorithm, TOLERANCES[step.dtype], critic_of(step, update)
    indices = [i for i in update.samples if not step.is_masked(step.samples[i])]
    count, clip, loss, clipped = sum(len(returns[i]) for i in indices), algorithm.critic.value_clip, 0.0, 0
    slope = balancing_slope(step, update, critic.model) if algorithm.router_aux_loss_coef else None
    for i in indices:
        values = critic.values(step, step.samples[i])
        errors = (values - returns[i]).square()
        if clip is not None:
            near = torch.maximum(torch.minimum(values, before[i] + clip), before[i] - clip)
            others = (near - returns[i]).square()
            clipped += int((others > errors).sum())
            errors = torch.maximum(errors, others)
        part = 0.5 * errors.sum() / max(count, 1)
        part.backward()
        loss += part.item()
        if slope is not None:
            (router_logits(step, critic.model, step.samples[i]).softmax(dim=-1) @ slope).sum().backward()
    gradients = [p.grad for p in (*critic.model.parameters(), critic.head) if p.grad is not None]
    norm = sum(gradient.square().sum().item() for gradient in gradients) ** 0.5
    for name, value, tolerance in (
        ("critic/loss", loss, tolerances.loss),
        ("critic/grad_norm", norm, tolerances.grad_norm),
    ):
        yield compare(name, [update.metric(name)], [value], tolerance, lambda _: "", 0.0)
    if clip is not None and count:
        share, name = update.metric("critic/clip_ratio"), "critic/clip_ratio"
        yield compare(name, [share], [clipped / count], 2 / count, lambda _: "")
