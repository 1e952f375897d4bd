"""The z-loss of routers: its value and gradient are the naive formula's, and the same in every layout and with
replayed routes."""

import functools
from pathlib import Path

import pytest
import torch
import transformers
from dumped_steps import make_model
from layouts import AXES, EXPERTS, config_of, parametrize_rows, ranks
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from suites import usual
from test_dump_layouts import audit
from test_latent_parity import V3
from test_routing_replay import dump
from tiny_policy import SHAPES, few_samples, tiny_model

from megagrpo.config import ParallelSection, RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.proof.audit import naive
from megagrpo.proof.verify.shrink import plainly, random_tensor, shrink_model
from megagrpo.proof.verify.verified_step import Outcome, relative_error, take_step

COEFFICIENT = 0.3
FEW = (
    dict(recompute="full", budget="tight"),
    dict(recompute="selective", share_prompts=True),
    dict(dp=2, ep=2, distributed_optimizer=True),
    dict(pp=2, vpp=2, recompute="full", budget="tight"),
    dict(tp=2, cp=2, sequence_parallel=True, share_prompts=True, ep=2, etp=1),
)


def row_of(**options) -> dict:
    return {axis: values[0] for axis, values in AXES.items()} | dict(model="qwen3_moe") | options


def config(row: dict, coefficient: float = COEFFICIENT, replay: str = "off") -> RunConfig:
    made = config_of(row)
    algorithm = made.algorithm.model_copy(update=dict(router_z_loss_coef=coefficient))
    rollout = made.rollout.model_copy(update=dict(routing_replay=replay))
    return made.model_copy(update=dict(algorithm=algorithm, rollout=rollout))


@functools.cache
def one_process(model: str, loss: str, replay: str = "off", coefficient: float = COEFFICIENT) -> Outcome:
    settings = plainly(config(row_of(model=model, loss=loss), coefficient, replay))
    return run_ranks(take_step, 1, settings, tiny_model(model), few_samples())[0]


def check(row: dict, replay: str = "off") -> None:
    (found, *_) = run_ranks(take_step, ranks(row), config(row, replay=replay), tiny_model(row["model"]), few_samples())
    expected = one_process(row["model"], row["loss"], replay)
    assert found.metrics["z_loss"] == pytest.approx(expected.metrics["z_loss"], rel=1e-6)
    worst = max((relative_error(found.gradients[name], known), name) for name, known in expected.gradients.items())
    assert worst < (1e-5, "")


@pytest.mark.full
@pytest.mark.parametrize("options", FEW, ids=str)
def test_the_z_loss_is_the_same_in_this_layout(options):
    check(row_of(**options))


@pytest.mark.full
def test_the_z_loss_of_replayed_routes_is_the_same_in_this_layout():
    check(row_of(pp=2, recompute="full", share_prompts=True), "engine")


@functools.cache
def adapted(number: int, z_loss: float = COEFFICIENT, balance: float = 2.0) -> Outcome:
    """The step of adapters on attention and experts with both losses of frozen routers, in layout `number`."""
    row = row_of(**([{}, *WITH_ADAPTERS][number]))
    made = config(row, z_loss)
    algorithm = made.algorithm.model_copy(update=dict(router_aux_loss_coef=balance))
    lora = made.lora.model_copy(update=dict(rank=4, target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
    made = made.model_copy(update=dict(algorithm=algorithm, lora=lora))
    return run_ranks(take_step, ranks(row), made, tiny_model(row["model"]), few_samples())[0]


WITH_ADAPTERS = (
    dict(dp=2, ep=2, distributed_optimizer=True),
    dict(tp=2, cp=2, sequence_parallel=True, share_prompts=True, ep=2, etp=1),
)


@pytest.mark.parametrize("number", usual([1, 2]))
def test_the_losses_of_frozen_routers_reach_adapters_alike_in_this_layout(number):
    found, expected = adapted(number), adapted(0)
    for loss in ("z_loss", "aux_loss"):
        assert found.metrics[loss] == pytest.approx(expected.metrics[loss], rel=1e-6)
    assert all(".lora_" in name for name in expected.gradients)
    assert max(relative_error(found.gradients[name], known) for name, known in expected.gradients.items()) < 1e-5
    for without in (adapted(0, z_loss=0.0), adapted(0, balance=0.0)):
        apart = [relative_error(without.gradients[name], known) for name, known in expected.gradients.items()]
        assert max(apart) > 1e-3


def pytest_generate_tests(metafunc):
    parametrize_rows(metafunc, models=EXPERTS)


@pytest.mark.full
def test_the_z_loss_is_the_same_in_all_layouts(row):
    check(row)


def naively(model: HfConfig, temperature: float, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean over loss tokens of logsumexp(logits)^2, summed over layers, by transformers, and its gradient."""
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**model.raw)).save_pretrained(
        folder
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    weights = {name: random_tensor(name, shape, temperature) for name, shape in shapes.items()}
    moved = {name: weight + 0.02 * torch.sin(40 * weight) for name, weight in weights.items()}  # as `take_step` does
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    policy, samples = naive.load_model(folder, "float32"), few_samples()
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        before = sample.response_mask.nonzero()[:, 0] - 1
        for logits in policy(sample.token_ids[None], output_router_logits=True).router_logits:
            total = total + torch.log(torch.exp(logits[before]).sum(-1)).pow(2).sum()
        tokens += len(before)
    loss = total / tokens
    loss.backward()
    return loss.item(), {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


def test_value_and_gradient_are_the_formulas(tmp_path):
    model = tiny_model("qwen3_moe")
    with_it, without = (one_process("qwen3_moe", "grpo", "off", c) for c in (COEFFICIENT, 0.0))
    temperature = config(row_of()).rollout.temperature
    ((value, gradients),) = run_ranks(naively, 1, model, temperature, tmp_path)
    assert with_it.metrics["z_loss"] == pytest.approx(value, rel=1e-6)
    assert "z_loss" not in without.metrics and with_it.metrics["loss"] == without.metrics["loss"]
    routers = [one for one in gradients if one.endswith("mlp.gate.weight")]
    assert len(routers) == len(model.experts.blocks) > 1
    for router in routers:
        found = (with_it.gradients[router] - without.gradients[router]) / COEFFICIENT
        assert relative_error(found, gradients[router].double()) < 1e-4, router
        assert found.norm() > 0


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.full)])
def test_the_audit_agrees_with_the_gradient_norm(family, tmp_path, capfd):
    raw = V3 if family == "deepseek_v3" else SHAPES[family]
    run_ranks(make_model, 1, tmp_path / "model", shrink_model(raw, ParallelSection(tp=2, pp=2, ep=2, etp=2)))
    run_ranks(dump, 2, raw, dict(pp=2), dict(algorithm=dict(router_z_loss_coef=0.1)), "engine", tmp_path)
    assert run_ranks(audit, 1, tmp_path, 1) == [0], capfd.readouterr().out
