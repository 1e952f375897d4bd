"""Losses on pairs of responses, of which one is preferred: DPO, its variants, and losses without a reference.

`config/sections/loss_table.py` has a row for each; formulas are those of the papers named, as TRL 1.16 computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from megagrpo.config import AlgorithmSection
from megagrpo.train_types import LossFn, LossInputs, LossOutput, Metric, MicroBatch


@dataclass(frozen=True)
class Pairs:
    """The n pairs of a micro-batch; rows are [n, 2] float32: chosen, rejected."""

    logprobs: Tensor  # summed over the response, with gradient
    ref_logprobs: Tensor  # 0 without a reference
    lengths: Tensor  # loss tokens
    beta: float
    arguments: Mapping[str, float]
    values: Tensor  # the samples' advantages: what `of_step` returns for a loss that compares the whole step

    @property
    def ratios(self) -> Tensor:
        """[n, 2]: log(policy / reference) of each response."""
        return self.logprobs - self.ref_logprobs

    @property
    def means(self) -> Tensor:
        """[n, 2]: `ratios` per token."""
        return self.ratios / self.lengths

    @property
    def margin(self) -> Tensor:
        """[n]: beta times the difference of the ratios."""
        return self.beta * _difference(self.ratios)


def _difference(rows: Tensor) -> Tensor:
    return rows[:, 0] - rows[:, 1]


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    return -logsigmoid(logits) * (1 - smoothing) - logsigmoid(-logits) * smoothing


def sigmoid(p: Pairs) -> Tensor:
    """[n]: -log sigmoid(margin) (DPO, Rafailov et al. 2023, eq. 7); labels are wrong with probability `label_smoothing`
    (cDPO)."""
    return _smoothed(p.margin, p.arguments["label_smoothing"])


def sigmoid_norm(p: Pairs) -> Tensor:
    """[n]: sigmoid of ratios per token."""
    return -logsigmoid(p.beta * _difference(p.means))


def robust(p: Pairs) -> Tensor:
    """[n]: an unbiased loss under wrong labels (Chowdhury et al. 2024, eq. 8)."""
    smoothing, margin = p.arguments["label_smoothing"], p.margin
    return (-logsigmoid(margin) * (1 - smoothing) + logsigmoid(-margin) * smoothing) / (1 - 2 * smoothing)


def hinge(p: Pairs) -> Tensor:
    """[n]: max(0, 1 - margin) (SLiC, Zhao et al. 2023)."""
    return relu(1 - p.margin)


def ipo(p: Pairs) -> Tensor:
    """[n]: (difference of the ratios per token - 1 / (2 beta))^2 (Azar et al. 2023, eq. 17)."""
    return (_difference(p.means) - 1 / (2 * p.beta)) ** 2


def exo_pair(p: Pairs) -> Tensor:
    """[n]: KL to the smoothed labels (EXO, Ji et al. 2024, eq. 16)."""
    smoothing, margin = torch.tensor(p.arguments["label_smoothing"]), p.margin
    right = margin.sigmoid() * (logsigmoid(margin) - (1 - smoothing).log())
    return right + (-margin).sigmoid() * (logsigmoid(-margin) - smoothing.log())


def nca_pair(p: Pairs) -> Tensor:
    """[n]: noise-contrastive alignment (Chen et al. 2024)."""
    chosen, rejected = (p.beta * p.ratios).unbind(1)
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def sppo_hard(p: Pairs) -> Tensor:
    """[n]: squared distances of the ratios from +-1 / (2 beta) (SPPO, Wu et al. 2024)."""
    chosen, rejected = p.ratios.unbind(1)
    return (chosen - 0.5 / p.beta) ** 2 + (rejected + 0.5 / p.beta) ** 2


def apo_zero(p: Pairs) -> Tensor:
    """[n]: raises the chosen and lowers the rejected response (APO, D'Oosterlinck et al. 2024)."""
    chosen, rejected = (p.beta * p.ratios).unbind(1)
    return 1 - chosen.sigmoid() + rejected.sigmoid()


def apo_down(p: Pairs) -> Tensor:
    """[n]: lowers both, the rejected one more: for a policy that is better than the chosen responses."""
    return (p.beta * p.ratios[:, 0]).sigmoid() + 1 - p.margin.sigmoid()


def discopop(p: Pairs) -> Tensor:
    """[n]: a mixture of logistic and exponential loss that a search has found (Lu et al. 2024)."""
    margin = p.margin
    share = (margin / p.arguments["tau"]).sigmoid()
    return -logsigmoid(margin) * (1 - share) + (-margin).exp() * share


def simpo(p: Pairs) -> Tensor:
    """[n]: -log sigmoid(beta difference of log-probs per token - gamma), without a reference (Meng et al. 2024)."""
    return _smoothed(p.beta * _difference(p.means) - p.arguments["gamma"], p.arguments["label_smoothing"])


def orpo(p: Pairs) -> Tensor:
    """[n]: -log p per token of the chosen response, minus beta log sigmoid of the log odds ratio (Hong et al. 2024)."""
    odds = p.means - torch.log1p(-p.means.exp())
    return -p.means[:, 0] - p.beta * logsigmoid(_difference(odds))


def bco_pair(p: Pairs) -> Tensor:
    """[n]: a classifier of each response (BCO, Jung et al. 2024), with the border at 0."""
    chosen, rejected = (p.beta * p.ratios).unbind(1)
    return -logsigmoid(chosen) - logsigmoid(-rejected)


def aot(p: Pairs) -> Tensor:
    """[n]: DPO whose reference margin is the one of the same rank in the step (AOT, Melnyk et al. 2024)."""
    return _smoothed(p.beta * (_difference(p.logprobs) - p.values[:, 0]), p.arguments["label_smoothing"])


def aot_unpaired(p: Pairs) -> Tensor:
    """[n]: DPO on the chosen and the rejected response of the same rank in the step. Each response of a pair meets its
    own partner, so both halves have the whole gradient, and the value of half of their sum."""
    own = p.beta * (p.ratios - p.values) * torch.tensor([1.0, -1.0], device=p.values.device)
    losses = _smoothed(own, p.arguments["label_smoothing"]).sum(1)
    return losses - losses.detach() / 2


def kto(p: Pairs) -> Tensor:
    """[n]: 1 - sigmoid(+-beta (ratio - KL)) of one response with a label (KTO, Ethayarajh et al. 2024, eq. 8). Values
    are the label +-1 and the KL."""
    sign, kl = p.values.unbind(1)
    weights = torch.where(sign > 0, p.arguments["desirable_weight"], p.arguments["undesirable_weight"])
    return weights * (1 - (p.beta * sign * (p.ratios[:, 0] - kl)).sigmoid())


def of_step(algorithm: AlgorithmSection, sums: Tensor, values: Tensor) -> Tensor:
    """Return [N] float64: what each sample of a step gets as its value, for a loss that compares the whole step.

    `sums` [2, N] are the log-probs of the policy and of the reference, summed over responses; `values` [N] the labels.
    """
    policy, reference = sums.view(2, -1, 2)
    ratios, found = policy - reference, values.double().view(-1, 2).clone()
    if algorithm.loss_type == "kto":  # the KL: the mean over the responses to other prompts
        found[:, 1] = ratios[:, 1].mean().clamp(min=0)
    elif algorithm.loss_type == "aot":
        found[:, 0] = _of_rank(_difference(reference), _difference(policy))
    else:
        chosen, rejected = ratios.unbind(1)
        found = torch.stack([_of_rank(rejected, chosen), _of_rank(chosen, rejected)], 1)
    return found.flatten()


def _of_rank(values: Tensor, like: Tensor) -> Tensor:
    """Return [n]: for each element of `like` [n] the one of `values` [n] that has its rank."""
    return values.sort().values[like.argsort().argsort()]


def make_loss(algorithm: AlgorithmSection) -> LossFn:
    """Return the loss of a micro-batch. Each pair counts as two sequences, so its value counts twice."""
    term = globals()[algorithm.loss.policy_term]
    arguments = {**algorithm.loss.arguments, **algorithm.loss_args}

    def loss(inputs: LossInputs) -> LossOutput:
        pairs = pairs_of(inputs, algorithm.beta, arguments)
        losses = term(pairs)
        rewards = (pairs.beta * (pairs.ratios if algorithm.loss.reference else pairs.means)).detach()
        if algorithm.loss_type == "kto":
            return LossOutput(2 * losses.sum(), _labeled_metrics(pairs, rewards[:, 0]))
        metrics = {
            "rewards/chosen": rewards[:, 0],
            "rewards/rejected": rewards[:, 1],
            "rewards/margin": _difference(rewards),
            "rewards/accuracy": (_difference(rewards) > 0).float(),
            "logprob": pairs.logprobs.detach()[:, 0],
            "logprob/rejected": pairs.logprobs.detach()[:, 1],
        }
        return LossOutput(2 * losses.sum(), {name: Metric(row.sum(), len(row)) for name, row in metrics.items()})

    return loss


def _labeled_metrics(pairs: Pairs, rewards: Tensor) -> dict[str, Metric]:
    sign, kl = pairs.values.unbind(1)
    right = (rewards * sign > pairs.beta * kl * sign).float()
    metrics = {"rewards/accuracy": Metric(right.sum(), len(right)), "kl": Metric(kl.sum(), len(kl))}
    for name, own in (("chosen", sign > 0), ("rejected", sign < 0)):
        metrics[f"rewards/{name}"] = Metric(rewards[own].sum(), own.sum())
    return metrics


def make_score_loss(algorithm: AlgorithmSection) -> LossFn:
    """Return the loss of a reward model, which gets scores as log-probs, with the margins of the chosen responses as
    advantages: -log sigmoid(chosen - rejected - margin) (Bradley-Terry; Touvron et al. 2023, eq. 2), and `center` times
    the squared sum of the scores, which keeps them near 0 (Eisenstein et al. 2023)."""
    center = {**algorithm.loss.arguments, **algorithm.loss_args}["center"]

    def loss(inputs: LossInputs) -> LossOutput:
        rows = (
            sums_of_samples(inputs.micro_batch, row) for row in (inputs.policy_logprobs, inputs.micro_batch.advantages)
        )
        values, margins = (row.view(-1, 2) for row in rows)
        margin = _difference(values)
        losses = -logsigmoid(margin - margins[:, 0]) + center * values.sum(1) ** 2
        found = values.detach()
        metrics = {
            "rewards/chosen": found[:, 0],
            "rewards/rejected": found[:, 1],
            "rewards/margin": _difference(found),
            "rewards/accuracy": (_difference(found) > 0).float(),
        }
        return LossOutput(2 * losses.sum(), {name: Metric(row.sum(), len(row)) for name, row in metrics.items()})

    return loss


def pairs_of(inputs: LossInputs, beta: float, arguments: Mapping[str, float]) -> Pairs:
    """Return the pairs of a micro-batch, in which both responses of a pair are."""
    m, policy = inputs.micro_batch, inputs.policy_logprobs
    reference = torch.zeros_like(policy) if m.terms.ref_logprobs is None else m.terms.ref_logprobs
    ones = torch.ones_like(policy)
    logprobs, of_reference, lengths, values = (
        sums_of_samples(m, row).view(-1, 2) for row in (policy, reference, ones, m.advantages)
    )
    return Pairs(logprobs, of_reference, lengths, beta, arguments, values / lengths)


def sums_of_samples(m: MicroBatch, row: Tensor) -> Tensor:
    """Return [n]: the sum of `row` [T] over the loss tokens of each sample of a micro-batch, ordered by sample."""
    samples: Any = m.samples
    known = torch.unique(samples[samples >= 0])
    places = torch.where(samples >= 0, torch.searchsorted(known, samples), known.numel())
    of_tokens = places.to(row.device)[m.sequence_index]
    masked = torch.where(m.loss_mask, row, 0.0)
    return masked.new_zeros(known.numel() + 1).index_add(0, of_tokens, masked)[:-1]
