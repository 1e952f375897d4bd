"""A step with the choices for every kind of CPU, compared with a float32 step with the choices for a plain CPU."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from suites import usual
from tiny_policy import few_samples, tiny_model, tiny_run
from torch import Tensor
from torch.nn import functional

from megagrpo.platform import device
from megagrpo.platform.device import cpu
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
    outcome = take_step(config, tiny_model("qwen3_untied"), few_samples())
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


def expected_setting(kind: str) -> str:
    """torch's setting of float32 products: bf16 is permitted only where oneDNN does not use it."""
    return "medium" if cpu.CPU_KINDS[kind].float32_by_onednn and not cpu.has_amx() else "highest"


@pytest.mark.parametrize("kind", usual(cpu.CPU_KINDS, 1, 3))
def test_float32_is_float32_on_every_kind_of_cpu(kind, plain):
    outcome, _, setting = step(kind, "fp32")
    assert setting == expected_setting(kind)
    assert furthest(outcome, plain, "gradients") < 1e-5 and furthest(outcome, plain, "weights") < 1e-5
    assert abs(outcome.metrics["loss"] - plain.metrics["loss"]) < 1e-6


def operations() -> dict[str, Callable[..., Tensor]]:
    """Each product, attention, norm, gate, recurrence and log-prob that a step takes, as a function of x and y
    [128, 128]."""
    from megagrpo.policy.attention.causal import Scores, causal_attention
    from megagrpo.policy.blocks.gated_delta import gated_delta_rule
    from megagrpo.policy.layers import elementwise
    from megagrpo.policy.lm_head.task import HeadTask
    from megagrpo.policy.lm_head.vocab_logprobs import vocab_logprobs

    def heads(x: Tensor) -> Tensor:
        return x.view(1, 4, 128, 32)

    def delta(x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (z.view(1, 128, 4, 32) for z in (x, y, x + y))
        return gated_delta_rule(q, k, v, -x[:, :4].abs()[None], y[:, :4].sigmoid()[None])

    labels = torch.arange(128) * 7 % 128
    return {
        "mm": lambda x, y: x @ y,
        "linear": lambda x, y: functional.linear(x, y),
        "addmm": lambda x, y: torch.addmm(x, x, y),
        "bmm": lambda x, y: torch.bmm(x.view(2, 64, 128), y.expand(2, 128, 128)),
        "baddbmm": lambda x, y: torch.baddbmm(x.view(2, 64, 128), x.view(2, 64, 128), y.expand(2, 128, 128)),
        "einsum": lambda x, y: torch.einsum("abc,cd->abd", x.view(8, 16, 128), y),
        "mv": lambda x, y: x @ y[0],
        "conv1d": lambda x, y: functional.conv1d(x[None], y[:, None, :4].contiguous(), groups=128),
        "conv2d": lambda x, y: functional.conv2d(x.view(1, 1, 128, 128), y.view(16, 1, 32, 32), stride=32),
        "conv3d": lambda x, y: functional.conv3d(x.view(1, 1, 4, 64, 64), y.view(8, 1, 2, 32, 32), stride=(2, 32, 32)),
        "attention of torch": lambda x, y: functional.scaled_dot_product_attention(
            heads(x), heads(y), heads(x + y), is_causal=True
        ),
        "attention": lambda x, y: causal_attention(*(z.view(1, 128, 4, 32) for z in (x, y, x + y)), Scores(scale=0.2)),
        "gated delta rule": delta,
        "rms_norm": lambda x, y: elementwise.rms_norm(x, y[0], 1e-6),
        "layer_norm": lambda x, y: functional.layer_norm(x, (128,), y[0], y[1]),
        "swiglu": lambda x, y: elementwise.swiglu(x * y),
        "softmax": lambda x, y: (x * y).softmax(-1),
        "log-probs": lambda x, y: torch.stack(vocab_logprobs(x, y, HeadTask(labels, chunk=32))[:2]),
    }


def _furthest_operations(kind: str) -> dict[str, float]:
    """Relative distance of each operation and its gradients in float32 from float64."""
    os.environ[cpu.VARIABLE] = kind
    device.choose_float32_products()
    x, y = (torch.randn(128, 128, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    errors = {}
    for name, operation in operations().items():
        results = []
        for dtype in (torch.float32, torch.float64):
            leaves = [z.to(dtype).requires_grad_() for z in (x, y)]
            value = operation(*leaves)
            slope = torch.randn(value.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
            results.append([value, *torch.autograd.grad((value * slope).sum(), leaves)])
        pairs = zip(*results, strict=True)
        errors[name] = max(float((mine - exact).norm() / exact.norm()) for mine, exact in pairs)
    return errors


@pytest.mark.parametrize("kind", cpu.CPU_KINDS)
def test_each_operation_in_float32_rounds_as_float32_on_every_kind_of_cpu(kind):
    (errors,) = run_ranks(_furthest_operations, 1, kind)
    assert len(errors) == 18 and {name: error for name, error in errors.items() if not error < 1e-5} == {}


@pytest.mark.parametrize("kind", cpu.CPU_KINDS)
def test_auto_precision_trains_on_every_kind_of_cpu_within_the_rounding_of_its_dtype(kind, plain):
    outcome, dtype, _ = step(kind, "auto")
    bf16 = cpu.CPU_KINDS[kind].multiplies_bf16
    assert dtype == ("torch.bfloat16" if bf16 else "torch.float32")
    assert furthest(outcome, plain, "weights") < (ROUNDING if bf16 else 1e-5)
    difference = furthest(outcome, plain, "gradients")
    assert 1e-4 < difference < 0.3 if bf16 else difference < 1e-5


@pytest.mark.parametrize("kind", usual(cpu.CPU_KINDS, 1, 3))
def test_muon_steps_on_every_kind_of_cpu_and_leaves_the_float32_setting_alone(kind, plain_muon):
    outcome, _, setting = step(kind, "fp32", "muon")
    assert setting == expected_setting(kind)
    assert furthest(outcome, plain_muon, "weights") < ROUNDING  # its five Newton-Schulz steps are in bf16
