"""A policy with fused log-probs against one with chunked logits: log-probs, and the gradients of all weights."""

import pytest
import torch
from interpreted_triton import interpret
from ranks import RankFailed, run_ranks
from tiny_policy import few_samples, tiny_model, tiny_run

from megagrpo.algorithms.losses import make_loss
from megagrpo.config import ParallelSection, RunConfig
from megagrpo.platform import device
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.device_checks import check_device
from megagrpo.proof.verify.verified_step import prepare


def difference(train: dict) -> tuple[float, float]:
    """The largest log-prob difference, and the relative difference of all gradients, to the results without `train`."""
    interpret(scratch=2**14)
    found, layout = [], init_layout(ParallelSection(tp=2))
    for settings in ({}, train):
        config = tiny_run(
            dict(tp=2), algorithm=dict(beta=0.1, entropy_coef=0.01), train=dict(distributed_optimizer=False) | settings
        )
        policy, batch, logprobs = prepare(config, tiny_model("qwen2_untied"), layout, few_samples())
        policy.backward(batch, make_loss(config.algorithm), batch.num_tokens)
        gradients = [p.main_grad.flatten().clone() for chunk in policy.chunks for p in chunk.parameters()]
        found.append((torch.cat([row for row in logprobs if row is not None]), torch.cat(gradients)))
    (expected, oracle), (logprobs, gradient) = found
    return (logprobs - expected).abs().max().item(), ((gradient - oracle).norm() / oracle.norm()).item()


@pytest.mark.full
def test_fused_logprobs_change_no_logprob_and_no_gradient():
    for worst, relative in run_ranks(difference, 2, dict(fused_logprobs=True)):
        assert worst < 1e-5 and relative < 1e-5


@pytest.mark.full
def test_fp8_logprobs_are_close_and_not_equal():
    for worst, relative in run_ranks(difference, 2, dict(fused_logprobs=True, logprobs_fp8_recipe="blockwise")):
        assert 1e-4 < worst < 0.5 and 1e-4 < relative < 0.5


def build(train: dict) -> None:
    prepare(tiny_run(train=train), tiny_model("qwen2_untied"), init_layout(tiny_run().parallel), few_samples())


def checked(config: RunConfig) -> torch.dtype:
    return check_device(config, tiny_model("qwen2_untied"))


@pytest.mark.parametrize(
    ("name", "capability"),
    [("NVIDIA A100-SXM4-80GB", (8, 0)), ("NVIDIA L40S", (8, 9)), ("NVIDIA B200", (10, 0)), ("NVIDIA H200", (9, 0))],
)
def test_gpus_that_the_kernels_are_not_for_refuse_them_before_there_is_a_model(name, capability, monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    checked(tiny_run(model=dict(precision="bf16")))
    asked = tiny_run(model=dict(precision="bf16"), train=dict(fused_logprobs=True))
    if capability == (9, 0):
        checked(asked)
        return
    with pytest.raises(
        ValueError, match=f"train.fused_logprobs: true is not possible: {name} is not a Hopper GPU; set it to false"
    ):
        checked(asked)


def test_fused_logprobs_without_a_gpu_are_refused_with_the_reason():
    with pytest.raises(
        RankFailed, match=r"train.fused_logprobs: true is not possible: there is no GPU; set it to false"
    ):
        run_ranks(build, 1, dict(fused_logprobs=True))
