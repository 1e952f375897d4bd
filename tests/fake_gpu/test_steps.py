"""A step on a fake GPU is the step of the CPU, in float32 and bf16, and with each option that has its own code for
GPUs."""

import functools

import pytest
import torch
from ranks import run_ranks
from tiny_policy import tiny_model, tiny_run

from megagrpo.proof.verify.shrink import random_samples
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import compare, silent_tensors
from tests.fake_gpu.runtime import needs_fake_gpu, on_gpus

pytestmark = [pytest.mark.fake_gpu, needs_fake_gpu, pytest.mark.timeout(600)]
OPTIONS = {
    "float32": ("qwen2_untied", {}),
    "experts": ("qwen3_moe", {}),
    "recomputation and masters in shards": (
        "qwen3_tied",
        dict(model=dict(recompute="full"), train=dict(distributed_optimizer=True)),
    ),
    "adapters": ("qwen2_untied", dict(lora=dict(rank=4))),
    "adapters of experts": (
        "qwen3_moe",
        dict(lora=dict(rank=4, target_parameters=["experts.gate_up_proj", "experts.down_proj"])),
    ),
    "routes of the engine": ("qwen3_moe", dict(rollout=dict(routing_replay="engine"))),
    "whole samples": ("llama_tied", dict(train=dict(share_prompts=False))),
    "exact KL": ("qwen3_untied", dict(algorithm=dict(beta=0.1, kl_estimator="full_reverse"))),
    "top-p": ("qwen3_untied", dict(rollout=dict(temperature=0.8, top_p=0.9, top_k=40))),
}


@functools.cache
def found(option: str, on_gpu: bool, precision: str = "fp32") -> Outcome:
    """The outcome of a step with this option."""
    shape, sections = OPTIONS[option]
    model = dict(path="tiny", precision=precision) | sections.get("model", {})
    arguments = tiny_run({}, **sections | dict(model=model)), tiny_model(shape), random_samples()
    return (on_gpus(take_step, 1, *arguments) if on_gpu else run_ranks(take_step, 1, *arguments))[0]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_float32_step_is_the_one_of_the_cpu(option):
    outcome = found(option, on_gpu=True)
    assert silent_tensors(outcome) == []
    assert [d for d in compare(outcome, found(option, on_gpu=False)) if not d.passed] == []


def test_a_bf16_step_is_as_near_to_float32_as_the_one_of_the_cpu():
    exact, rounded, outcome = found("float32", False), found("float32", False, "bf16"), found("float32", True, "bf16")
    assert [d for d in compare(outcome, exact, rounded, True) if not d.passed] == []
    assert not torch.equal(outcome.logprobs, exact.logprobs)


def two_losses_of_one_seed() -> list[float]:
    """Sums of random numbers on the device: two of a seed, and one of the numbers after the second."""
    sums = []
    for _ in range(2):
        torch.manual_seed(5)
        sums.append(torch.randn(100, device="cuda").sum().item())
    return [*sums, torch.randn(100, device="cuda").sum().item()]


def test_random_numbers_follow_the_seed_of_the_device():
    first, again, later = on_gpus(two_losses_of_one_seed, 1)[0]
    assert first == again != later
