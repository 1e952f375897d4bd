"""Between the first and the last micro-batch of a pass no GPU's host waits for the device: all numbers that shapes
depend on come from packing. Every wait leaves the GPU without work until the host has launched the next kernels."""

from __future__ import annotations

import collections

import pytest
import torch
from host_waits import HostWaits
from ranks import run_ranks
from suites import usual
from tiny_policy import tiny_model, tiny_run

EXPERTS = "megatron/core/transformer/moe/"  # tokens of each expert are known on the device only
CASES = {
    "shared prompts": ("qwen2_untied", {}, {}),
    "whole samples": ("llama_tied", {}, dict(train=dict(share_prompts=False))),
    "capped scores and scaled embeddings": ("gemma2", {}, {}),
    "experts with the balancing loss": ("qwen3_moe", {}, dict(algorithm=dict(router_aux_loss_coef=0.1))),
    "truncated distributions": ("qwen3_tied", {}, dict(rollout=dict(temperature=0.8, top_p=0.9, top_k=40))),
    "exact KL": ("qwen3_untied", {}, dict(algorithm=dict(beta=0.1, kl_estimator="full_reverse"))),
    "ratio of sequences": ("qwen3_untied", {}, dict(algorithm=dict(importance_sampling_level="sequence"))),
    "entropy bonus": ("qwen3_untied", {}, dict(algorithm=dict(entropy_coef=0.01, top_entropy_quantile=0.5))),
    "LoRA": ("qwen2_untied", {}, dict(lora=dict(rank=4))),
    "recomputation": ("qwen2_untied", {}, dict(model=dict(recompute="full", precision="fp32"))),
    "context parallelism": ("qwen2_untied", dict(cp=2), {}),
    "sequence parallelism": ("qwen3_untied", dict(tp=2, sequence_parallel=True), {}),
}
BY_DEFAULT = ("context parallelism",)


def waits_of_a_step(shape: str, parallel: dict, sections: dict) -> tuple[dict[str, int], dict[str, int]]:
    """Return the waits inside the passes over the micro-batches, and those of the metrics after them."""
    from megagrpo.algorithms.losses import make_loss
    from megagrpo.platform.parallel.layout import init_layout
    from megagrpo.policy.step_terms import add_step_terms
    from megagrpo.proof.verify.shrink import random_samples
    from megagrpo.proof.verify.verified_step import prepare

    config = tiny_run(parallel, **sections)
    layout = init_layout(config.parallel, config.run.seed)
    policy, batch, _ = prepare(config, tiny_model(shape), layout, random_samples())
    batch = add_step_terms(batch, policy, batch.num_tokens, config.algorithm.entropy_coef)
    assert len(batch.micro_batches) > 1
    with HostWaits() as mode:
        for chunk in policy.chunks:
            mode.mark([[p, p.main_grad] if p.requires_grad else p for p in chunk.parameters()] + [*chunk.buffers()])
        policy._schedule, policy._reduce_metrics = (
            mode.counted(policy._schedule, "pass"),
            mode.counted(policy._reduce_metrics, "metrics"),
        )
        policy.logprobs(batch)
        policy.backward(batch, make_loss(config.algorithm), batch.num_tokens)
    layout.close()
    return dict(mode.waits["pass"]), dict(mode.waits["metrics"])


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.full]) for name in CASES]
)
def test_no_pass_waits_for_the_device_and_metrics_need_one_transfer_per_step(case):
    shape, parallel, sections = CASES[case]
    ranks = parallel.get("tp", 1) * parallel.get("cp", 1)
    for inside, after in run_ranks(waits_of_a_step, ranks, shape, parallel, sections):
        assert [wait for wait in inside if EXPERTS not in wait] == []
        assert list(after.values()) == [1] and "tolist at policy/metric_sums.py" in next(iter(after))


def probed() -> dict[str, int]:
    """The waits of operations whose kind is known."""
    with HostWaits() as mode, mode.counting("all"):
        device, host = mode.mark(torch.arange(4.0)), torch.arange(4)
        int(host.sum())
        host.tolist()
        moved = host.to(torch.device("cpu"), non_blocking=True)
        device[moved].index_add(0, moved, device).repeat_interleave(moved, output_size=6)
        device[device > 1] = 0.0  # torch fills by the mask, without a selection
        assert not mode.waits["all"]
        float(device.sum())
        (device > 1).nonzero()
        device[device > 1]
        device.repeat_interleave(moved)
        torch.equal(device, device)
        moved.tolist()
        moved.cpu()
        host.to(torch.device("cpu"))
        if device.max() > 2:
            pass
    return collections.Counter(wait.split(" at ")[0] for wait in mode.waits["all"].elements())


def test_the_mode_of_these_tests_sees_each_kind_of_wait():
    expected = dict(nonzero=1, index=1, repeat_interleave=1, equal=1, tolist=1, cpu=1, _local_scalar_dense=2) | {
        "to(device)": 1
    }
    assert probed() == expected


def steps_with_wrong_early_gradients() -> list[tuple[float, list[torch.Tensor]]]:
    """Return loss and gradients of a step whose loss says wrongly that its gradient is local, and of one whose loss
    says the truth."""
    from megagrpo.platform.parallel.layout import init_layout
    from megagrpo.proof.verify.shrink import random_samples
    from megagrpo.proof.verify.verified_step import prepare
    from megagrpo.train_types import LossInputs, LossOutput

    def neighbours(inputs: LossInputs) -> LossOutput:
        rows = inputs.policy_logprobs
        return LossOutput((rows[1:] * rows[:-1]).sum(), {})

    config = tiny_run({}, algorithm=dict(beta=0.0))
    layout = init_layout(config.parallel, config.run.seed)
    policy, batch, _ = prepare(config, tiny_model("qwen3_tied"), layout, random_samples())
    steps = []
    for early in (True, False):
        policy._early = early
        metrics = policy.backward(batch, neighbours, 1)
        steps.append(
            (metrics["loss"].value, [p.main_grad.clone() for chunk in policy.chunks for p in chunk.parameters()])
        )
    layout.close()
    return steps


@pytest.mark.parametrize("ranks", usual([1, 2], 1))
def test_a_step_whose_early_gradients_were_wrong_is_repeated_without_them(ranks):
    for (loss, gradients), (expected_loss, expected) in run_ranks(steps_with_wrong_early_gradients, ranks):
        assert loss == expected_loss and all(map(torch.equal, gradients, expected))
