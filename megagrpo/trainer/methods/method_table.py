"""One row per method: what it differs in, and what builds its training loop. `Loss.method` names the row."""

from collections.abc import Callable
from functools import partial

from megagrpo.algorithms import preference_losses
from megagrpo.algorithms.sequences import masked_sum
from megagrpo.config import AlgorithmSection, RunConfig
from megagrpo.data.examples import DEMONSTRATIONS, LABELED, PREFERENCES
from megagrpo.train_types import LossFn, LossInputs, LossOutput, Metric
from megagrpo.trainer import wiring
from megagrpo.trainer.methods import reward_training
from megagrpo.trainer.methods.row_wiring import Method, build_rows
from megagrpo.trainer.rank import Build


def supervised_loss(algorithm: AlgorithmSection) -> LossFn:
    """Return the loss of supervised fine-tuning: -log p of all tokens that the assistant writes. Its denominator is the
    number of loss tokens of the optimizer step."""

    def loss(inputs: LossInputs) -> LossOutput:
        mask = inputs.micro_batch.loss_mask
        logprob, tokens = masked_sum(inputs.policy_logprobs, mask)
        entropy = Metric(*masked_sum(inputs.entropy, mask))
        return LossOutput(-logprob, {"logprob": Metric(logprob.detach(), tokens), "entropy": entropy})

    return loss


def preference(config: RunConfig) -> Method:
    """Return preference optimization by DPO and the other rows of `algorithms/preference_losses.py`.

    A pair is packed with one copy of its prompt, into one micro-batch. KTO's pair is a response with a label, and the
    response of another row, whose ratio estimates the KL. The reference is the frozen start of the policy, or
    the model below its adapters.
    """
    return Method(preference_losses.make_loss, LABELED if config.algorithm.loss_type == "kto" else PREFERENCES)


ROW_METHODS: dict[str, Callable[[RunConfig], Method]] = {
    "sft": lambda config: Method(supervised_loss, DEMONSTRATIONS),
    "dpo": preference,
    "reward": reward_training.method,
}
BUILDERS: dict[str, Build] = {"grpo": wiring.build}
BUILDERS |= {name: partial(build_rows, method) for name, method in ROW_METHODS.items()}
