"""Supervised fine-tuning: the loss is the mean of -log p over all tokens that the assistant writes."""

from __future__ import annotations

from megagrpo.algorithms.sequences import masked_sum
from megagrpo.config import AlgorithmSection, RunConfig
from megagrpo.data.examples import DEMONSTRATIONS
from megagrpo.train_types import LossFn, LossInputs, LossOutput, Metric
from megagrpo.trainer.methods.row_wiring import Method


def make_loss(algorithm: AlgorithmSection) -> LossFn:
    """Return the loss of a micro-batch: its denominator is the number of loss tokens of the optimizer step."""

    def loss(inputs: LossInputs) -> LossOutput:
        mask = inputs.micro_batch.loss_mask
        logprob, tokens = masked_sum(inputs.policy_logprobs, mask)
        entropy = Metric(*masked_sum(inputs.entropy, mask))
        return LossOutput(-logprob, {"logprob": Metric(logprob.detach(), tokens), "entropy": entropy})

    return loss


def method(config: RunConfig) -> Method:
    """Return what this method differs in."""
    return Method(make_loss, DEMONSTRATIONS)
