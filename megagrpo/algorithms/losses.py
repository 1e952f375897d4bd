"""Builds a configuration's loss: policy term, masks, correction of train-inference mismatch, KL, entropy bonus."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megagrpo.algorithms import policy_losses
from megagrpo.algorithms.correction import correction_metrics, correction_weights
from megagrpo.algorithms.custom_loss import load_policy_term
from megagrpo.algorithms.kl import token_kl
from megagrpo.algorithms.policy_losses import PolicyTerm, Tokens, importance_ratio, keep_on_policy
from megagrpo.algorithms.reductions import numerator
from megagrpo.algorithms.sequences import Sequences, masked_sum
from megagrpo.config import AlgorithmSection
from megagrpo.train_types import LossFn, LossInputs, LossOutput, Metric, TeacherTerm


def make_loss(algorithm: AlgorithmSection) -> LossFn:
    """Return `algorithm`'s loss as a function of a micro-batch. Raises ProblemError for an unusable loss of a user."""
    row = algorithm.loss
    policy_term: PolicyTerm = load_policy_term(algorithm) if row.custom else getattr(policy_losses, row.policy_term)

    def loss(inputs: LossInputs) -> LossOutput:
        batch, terms, policy = inputs.micro_batch, inputs.micro_batch.terms, inputs.policy_logprobs
        old = policy.detach() if terms.old_logprobs is None else terms.old_logprobs
        divisors = None if batch.several is None else batch.several.num_loss.to(policy.device, non_blocking=True)
        sequences = Sequences(batch.sequence_index, batch.loss_mask, batch.num_sequences, divisors)
        metrics = mismatch_metrics(old, batch.rollout_logprobs, batch.loss_mask)
        correction = None
        if algorithm.importance_correction != "off":
            band = (algorithm.importance_correction_min, algorithm.importance_correction_max)
            correction, _ = correction_weights(
                old, batch.rollout_logprobs, sequences, algorithm.importance_correction, *band
            )
            metrics |= correction_metrics(correction, sequences, algorithm.importance_correction)

        ratio = importance_ratio(policy, old, sequences, algorithm.importance_sampling_level)
        advantages = batch.advantages
        for term in terms.teachers:
            if term.logprobs is not None:
                advantages = advantages - term.weights * (apart := old - term.logprobs)
                metrics[f"teacher/{term.name}/divergence"] = _mean_where_taught(apart, term, batch.loss_mask)
        tokens = Tokens(policy, old, ratio, advantages, sequences, correction)
        per_token = policy_term(tokens, algorithm)
        if algorithm.off_policy_mask_threshold is not None:
            sampled = batch.rollout_logprobs if algorithm.importance_correction != "off" else old
            keep = keep_on_policy(policy, sampled, batch.advantages, sequences, algorithm.off_policy_mask_threshold)
            per_token = torch.where(keep, per_token, 0.0)
            metrics["off_policy_mask/kept"] = Metric(*masked_sum(keep.float(), batch.loss_mask))
        if terms.high_entropy is not None:
            per_token = torch.where(terms.high_entropy, per_token, 0.0)
        if correction is not None and not row.own_correction:
            per_token = per_token * correction
        compared = [term for term in terms.teachers if term.other is not None]
        # ahead of the backward pass only the first divergence is known
        for term, divergence in zip(compared, inputs.divergences, strict=False):
            per_token = per_token + term.weights * divergence
            metrics[f"teacher/{term.name}/divergence"] = _mean_where_taught(divergence, term, batch.loss_mask)
        kl = inputs.full_kl
        if terms.ref_logprobs is not None and not algorithm.kl_in_reward:
            kl = token_kl(policy, terms.ref_logprobs, ratio, algorithm.kl_estimator, algorithm.use_bias_correction_kl)
        if kl is not None:
            per_token = per_token + algorithm.beta * kl
            metrics["kl"] = Metric(*masked_sum(kl.detach(), batch.loss_mask))
        if terms.loss_weights is not None:
            per_token = per_token * terms.loss_weights
        metrics |= ratio_metrics(tokens, algorithm)
        metrics["entropy"] = Metric(*masked_sum(inputs.entropy, batch.loss_mask))
        total = numerator(per_token, sequences, row.average)
        if terms.high_entropy is not None:
            metrics["entropy/top"] = Metric(*masked_sum(inputs.entropy, terms.high_entropy))
        if terms.entropy_weights is not None:
            total = total - masked_sum(terms.entropy_weights * inputs.entropy, batch.loss_mask)[0]
        return LossOutput(numerator=total, metrics=metrics)

    return loss


def _mean_where_taught(values: Tensor, term: TeacherTerm, loss_mask: Tensor) -> Metric:
    """Return the mean of `values` [T] over the loss tokens that the teacher teaches."""
    return Metric(*masked_sum(values.detach(), loss_mask & (term.weights > 0)))


def ratio_metrics(tokens: Tokens, algorithm: AlgorithmSection) -> dict[str, Metric]:
    """What bounds do to the ratios: share of loss tokens (of sequences, when they have one ratio) below the range with
    A < 0, above with A > 0, and both where the ratio is clipped; share above the bound with A > 0 where the weight is.
    The others bound nothing a token could be out of."""
    ratio, advantages = tokens.ratio.detach(), tokens.advantages

    def share(which: Tensor) -> Metric:
        if algorithm.importance_sampling_level == "sequence":
            return Metric(*tokens.sequences.total_of_means(which.float()))
        return Metric(*masked_sum(which.float(), tokens.sequences.mask))

    if algorithm.loss.clips == "weight":
        return {"cispo_clip_ratio": share((ratio > algorithm.upper_epsilon) & (advantages > 0))}
    if algorithm.loss.clips != "ratio":
        return {}
    low = (ratio < 1 - algorithm.epsilon) & (advantages < 0)
    high = (ratio > 1 + algorithm.upper_epsilon) & (advantages > 0)
    return {
        "clip_ratio/low_mean": share(low),
        "clip_ratio/high_mean": share(high),
        "clip_ratio/region_mean": share(low | high),
    }


def mismatch_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> dict[str, Metric]:
    """Return how far the engine's log-probs are from the trainer's for the same weights: sums and counts over one
    micro-batch's loss tokens, all [T]; exact when added up over micro-batches and ranks.

    The first four's names and formulas are NeMo-RL's (`nemo_rl/algorithms/loss`, `ClippedPGLossFn`): d = old - rollout
    per token, m = log((exp(old) + exp(rollout)) / 2), k3(x) = exp(x) - x - 1 (Schulman 2020). The last two are TRL's.

    `token_mult_prob_error`: mean of exp|d|, 1 when the two agree. `gen_kl_error`: k3(d), which estimates KL(engine ||
    trainer) on tokens that the engine sampled. `policy_kl_error`: k3(-d), the other direction. `js_divergence_error`:
    the mean of k3(old - m) and k3(rollout - m). `sampling/sampling_logp_difference/mean` and `/max`: |d| in nats.
    """
    old, rollout = old_logprobs.detach(), rollout_logprobs
    difference = old - rollout
    mixture = torch.logaddexp(old, rollout) - math.log(2)
    per_token = {
        "token_mult_prob_error": difference.abs().exp(),
        "gen_kl_error": _k3(difference),
        "policy_kl_error": _k3(-difference),
        "js_divergence_error": (_k3(old - mixture) + _k3(rollout - mixture)) / 2,
        "sampling/sampling_logp_difference/mean": difference.abs(),
    }
    count = loss_mask.sum().float()
    sums = {name: Metric(torch.where(loss_mask, values, 0.0).sum(), count) for name, values in per_token.items()}
    largest = torch.where(loss_mask, difference.abs(), 0.0).max()
    return sums | {"sampling/sampling_logp_difference/max": Metric(largest, count, "max")}


def _k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - x - 1, with expm1: for the differences of two systems that agree, exp(x) - 1 would be rounding alone."""
    return log_ratio.expm1() - log_ratio
