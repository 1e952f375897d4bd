"""A step with the choices for every kind of CPU, compared with a float32 step with the choices for a plain CPU."""

import os

import pytest
import torch
from ranks import run_ranks
from tiny_policy import tiny_model, tiny_run

from megagrpo.platform import device
from megagrpo.platform.device import cpu
from megagrpo.proof.verify.shrink import random_samples
from megagrpo.proof.verify.verified_step import Outcome, relative_error, take_step

pytestmark = pytest.mark.skipif(device.has_gpu(), reason="a CPU decides nothing where there is a GPU")
PLAIN = "intel"  # float32 by MKL; products of bf16 numbers are computed in float32
ROUNDING = 3 * 2**-7  # tolerance for bf16, as in docs/verify.md


def _step(kind: str, precision: str, optimizer: str) -> tuple[Outcome, str, str]:
    """A step in this process with the choices for a CPU of `kind`, the step's dtype, and the float32 setting left
    behind."""
    os.environ[cpu.VARIABLE] = kind
    device.choose_float32_products()
    train = dict(optimizer=optimizer, max_grad_norm=0.0, share_prompts=False)
    config = tiny_run(model=dict(path="tiny", precision=precision), train=train | dict(distributed_optimizer=False))
    outcome = take_step(config, tiny_model("qwen3_untied"), random_samples())
    return outcome, str(device.resolve_precision(precision)), torch.get_float32_matmul_precision()


def step(kind: str, precision: str, optimizer: str = "adam") -> tuple[Outcome, str, str]:
    return run_ranks(_step, 1, kind, precision, optimizer)[0]


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return step(PLAIN, "fp32")[0]


@pytest.fixture(scope="module")
def plain_muon() -> Outcome:
    return step(PLAIN, "fp32", "muon")[0]


def furthest(outcome: Outcome, other: Outcome, what: str) -> float:
    """The largest relative difference of a tensor among the gradients or weights."""
    theirs = getattr(other, what)
    return max(relative_error(tensor, theirs[name]) for name, tensor in getattr(outcome, what).items())


@pytest.mark.parametrize("kind", cpu.CPU_KINDS)
def test_float32_is_float32_on_every_kind_of_cpu(kind, plain):
    outcome, _, setting = step(kind, "fp32")
    assert setting == ("medium" if cpu.CPU_KINDS[kind].float32_by_onednn else "highest")
    assert furthest(outcome, plain, "gradients") < 1e-5 and furthest(outcome, plain, "weights") < 1e-5
    assert abs(outcome.metrics["loss"] - plain.metrics["loss"]) < 1e-6


@pytest.mark.parametrize("kind", cpu.CPU_KINDS)
def test_auto_precision_trains_on_every_kind_of_cpu_within_the_rounding_of_its_dtype(kind, plain):
    outcome, dtype, _ = step(kind, "auto")
    bf16 = cpu.CPU_KINDS[kind].multiplies_bf16
    assert dtype == ("torch.bfloat16" if bf16 else "torch.float32")
    assert furthest(outcome, plain, "weights") < (ROUNDING if bf16 else 1e-5)
    difference = furthest(outcome, plain, "gradients")
    assert 1e-4 < difference < 0.3 if bf16 else difference < 1e-5


@pytest.mark.parametrize("kind", cpu.CPU_KINDS)
def test_muon_steps_on_every_kind_of_cpu_and_leaves_the_float32_setting_alone(kind, plain_muon):
    outcome, _, setting = step(kind, "fp32", "muon")
    assert setting == ("medium" if cpu.CPU_KINDS[kind].float32_by_onednn else "highest")
    assert furthest(outcome, plain_muon, "weights") < ROUNDING  # its five Newton-Schulz steps are in bf16
