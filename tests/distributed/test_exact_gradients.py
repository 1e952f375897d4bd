"""Micro-batch size, packing, gradient accumulation, data and context parallelism never change the gradient: equal to
the precision of float64. Also batches with almost no tokens."""

import functools
import math

import pytest
import torch
from layouts import AXES, EXPERTS, config_of, ranks
from ranks import run_ranks
from suites import usual
from tiny_policy import Case, few_samples, tiny_model

from megagrpo.config import RunConfig
from megagrpo.platform import device
from megagrpo.policy.optimizer import policy_optimizer as optimizer
from megagrpo.proof.verify.shrink import plainly, random_samples
from megagrpo.proof.verify.verified_step import Outcome, Tensors, relative_error, take_step
from megagrpo.proof.verify.verify_compare import compare
from megagrpo.train_types import TrainSample

LOSSES = {
    "grpo": dict(loss_type="grpo", beta=0.1),
    "dapo": dict(loss_type="dapo", beta=0.0),
    "dr_grpo": dict(loss_type="dr_grpo", beta=0.1, kl_estimator="full_reverse"),
    "bnpo": dict(loss_type="bnpo", beta=0.1, kl_estimator="low_var"),
    # methods on rows: the samples are pairs
    "sft": dict(loss_type="sft"),
    "kto": dict(loss_type="kto", beta=0.3),
    "bradley_terry": dict(loss_type="bradley_terry"),  # its head computes in float32
    # A group's first response tokens have equal entropies, the 12th to 14th of 71. The threshold is the largest, or lies
    # between the 11th and the 12th: both count the three tokens.
    "ties at the threshold": dict(loss_type="dapo", beta=0.0, top_entropy_quantile=57 / 70),
    "ties above the threshold": dict(loss_type="dapo", beta=0.0, top_entropy_quantile=59.5 / 70),
}
CHANGES = [
    dict(budget="tight"),
    dict(dp=3),
    dict(cp=2),
    dict(budget="tight", dp=2, cp=2, share_prompts=True),
]
ALL_AXES = dict(tp=2, pp=2, sequence_parallel=True, share_prompts=True)
DENSE = ("llama_tied", "qwen3_tied")


def row_of(model: str, **options) -> dict:
    return {axis: values[0] for axis, values in AXES.items()} | dict(model=model) | options


def config(row: dict, loss: str) -> RunConfig:
    made = config_of(row)
    algorithm = made.algorithm.model_validate(LOSSES[loss])
    # Megatron clips only float32 gradients.
    return made.model_copy(
        update=dict(algorithm=algorithm, train=made.train.model_copy(update=dict(max_grad_norm=0.0)))
    )


def in_float64(*arguments) -> Outcome | None:
    """A step with weights, activations and gradients in float64."""
    device.resolve_precision = lambda precision: torch.float64
    stock = optimizer.DistributedDataParallelConfig
    optimizer.DistributedDataParallelConfig = lambda **settings: stock(**settings | dict(grad_reduce_in_fp32=False))
    return take_step(*arguments)


@functools.cache
def one_process(model: str, loss: str, step=take_step) -> Outcome:
    return run_ranks(step, 1, plainly(config(row_of(model), loss)), tiny_model(model), few_samples())[0]


def worst_gradient(found: Outcome, expected: Outcome) -> tuple[float, str]:
    return max((relative_error(found.gradients[name], gradient), name) for name, gradient in expected.gradients.items())


@pytest.mark.parametrize(
    "loss", ["dapo", *(pytest.param(loss, marks=pytest.mark.full) for loss in ("dr_grpo", "grpo", "bnpo"))]
)
def test_in_float64_the_gradient_does_not_change(loss):
    expected = one_process("qwen2_untied", loss, in_float64)
    for change in CHANGES:
        row = row_of("qwen2_untied", **change)
        found = run_ranks(in_float64, ranks(row), config(row, loss), tiny_model("qwen2_untied"), few_samples())[0]
        assert worst_gradient(found, expected) < (1e-13, ""), change


# Megatron's router of experts always computes in float32.
@pytest.mark.parametrize(
    ("model", "limit", "cp"),
    usual(
        [("llama_tied", 1e-13, 1), *((model, 1e-13, 2) for model in DENSE), *((model, 1e-6, 2) for model in EXPERTS)], 0
    ),
)
def test_in_float64_the_gradient_is_the_same_when_all_axes_meet(model, limit, cp):
    """Context parallelism is beside tensor and pipeline parallelism on eight ranks."""
    row = row_of(model, **ALL_AXES | dict(cp=cp))
    found = run_ranks(in_float64, ranks(row), config(row, "grpo"), tiny_model(model), few_samples())[0]
    assert worst_gradient(found, one_process(model, "grpo", in_float64)) < (limit, "")


@pytest.mark.parametrize(("loss", "limit"), usual([("kto", 1e-13), ("bradley_terry", 1e-6), ("sft", 1e-13)], 0))
def test_in_float64_the_gradient_of_a_method_on_rows_does_not_change(loss, limit):
    row = row_of("llama_tied", **ALL_AXES)
    found = run_ranks(in_float64, ranks(row), config(row, loss), tiny_model("llama_tied"), few_samples())[0]
    expected = one_process("llama_tied", loss, in_float64)
    assert worst_gradient(found, expected) < (limit, "") and expected.metrics["loss"] and expected.metrics["grad_norm"]


# Context parallelism and shared prompts use other attention kernels: there equal entropies differ by 5e-7.
@pytest.mark.parametrize(
    "change",
    usual([dict(budget="tight", dp=2), dict(cp=2, share_prompts=True, distributed_optimizer=True)], 1),
    ids=str,
)
@pytest.mark.parametrize("loss", usual(["ties at the threshold", "dapo", "grpo", "dr_grpo", "bnpo"], 0))
def test_in_float32_a_step_is_that_of_float64_to_rounding(loss, change):
    row = row_of("llama_tied", **change)
    expected = one_process("llama_tied", loss.replace("ties at", "ties above"), in_float64)
    found = run_ranks(take_step, ranks(row), config(row, loss), tiny_model("llama_tied"), few_samples())[0]
    assert relative_error(flat(found.gradients), flat(expected.gradients)) < 3e-6
    assert relative_error(flat(found.weights), flat(expected.weights)) < 1e-6


def flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


# ------------------------------------------------------------------------------------------------------ next to nothing


def step(case: Case, samples: list[TrainSample], **algorithm) -> Outcome:
    return run_ranks(take_step, case.ranks, case.config(**algorithm), tiny_model("llama_tied"), samples)[0]


ONE = Case("one process", 1, {})
FEW_RANKS = [
    Case("dp3", 3, {}, train=dict(distributed_optimizer=True)),
    Case("pp2_dp2", 4, dict(pp=2)),
    Case("tp2_cp2", 4, dict(tp=2, cp=2, sequence_parallel=True)),
]


@pytest.mark.parametrize("case", usual(FEW_RANKS, 1), ids=str)
def test_ranks_without_any_loss_token_take_the_same_step(case):
    samples = random_samples()[1:2]
    assert samples[0].advantage != 0
    assert all(d.passed for d in compare(step(case, samples), step(ONE, samples)))


def without_advantage() -> list[TrainSample]:
    return [TrainSample(s.token_ids, s.response_mask, s.rollout_logprobs, 0.0) for s in few_samples()]


@pytest.mark.parametrize(("case", "skip"), usual([(ONE, False), *((case, True) for case in FEW_RANKS)], 0, 2), ids=str)
def test_without_advantages_and_kl_the_gradient_is_exactly_zero(case, skip):
    found = step(case, without_advantage(), beta=0.0, skip_zero_advantage=skip)
    assert not any(gradient.any() for gradient in found.gradients.values())
    assert found.metrics["loss"] == 0 == found.metrics["grad_norm"] and not any(map(math.isnan, found.metrics.values()))


@pytest.mark.full
@pytest.mark.parametrize("case", FEW_RANKS, ids=str)
def test_without_advantages_the_gradient_is_that_of_the_kl_alone(case):
    once, twice = step(case, without_advantage(), beta=0.1), step(case, without_advantage(), beta=0.2)
    assert flat(once.gradients).norm() > 0 and relative_error(flat(twice.gradients), 2 * flat(once.gradients)) < 1e-6
    assert all(d.passed for d in compare(once, step(ONE, without_advantage(), beta=0.1)))
