"""A frozen router has no gradient, no optimizer state and the same bits after steps; everything else trains as before."""

from functools import partial
from operator import attrgetter

import pytest
import torch
from dumped_steps import make_model
from layouts import AXES, config_of
from ranks import run_ranks
from suites import usual
from test_checkpoint_layouts import EP2, VPP_EP2, _make_model_with_experts, assert_continues, train_steps
from test_dump_layouts import audit
from test_gpt_oss import RAW as GPT_OSS
from test_routing_replay import dump
from tiny_policy import SHAPES, few_samples, tiny_model, tiny_run

from megagrpo.config import ParallelSection, RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.planned_memory import stage_memory
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.platform.parallel.spawn import RankFailed
from megagrpo.policy.moe.router_losses import routers
from megagrpo.policy.optimizer.policy_optimizer import held_by
from megagrpo.proof.verify.shrink import plainly, shrink_model
from megagrpo.proof.verify.verified_step import (
    policy_gradient,
    prepare,
    whole_tensors,
)

FEW = (
    dict(recompute="full"),
    dict(dp=2, ep=2, distributed_optimizer=True),
    dict(pp=2, vpp=2, recompute="full", budget="tight"),
    dict(tp=2, cp=2, sequence_parallel=True, share_prompts=True, ep=2, distributed_optimizer=True),
)


def row_of(**options) -> dict:
    return {axis: values[0] for axis, values in AXES.items()} | dict(model="qwen3_moe") | options


def config(row: dict, frozen: bool = True) -> RunConfig:
    made = config_of(row)
    return made.model_copy(update=dict(train=made.train.model_copy(update=dict(freeze_moe_router=frozen))))


def gradients(frozen: bool) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients of one process at given weights, and their norm."""
    settings, model = plainly(config(row_of(loss="dapo"), frozen)), tiny_model("qwen3_moe")
    layout = init_layout(settings.parallel)
    policy, batch, _ = prepare(settings, model, layout, few_samples())
    for router in routers(policy.chunks):
        torch.nn.init.normal_(router.weight.data, generator=torch.Generator().manual_seed(0))
    policy.weights_changed()
    policy.backward(batch, policy_gradient, 1)
    found, *_ = whole_tensors(policy, model, layout, attrgetter("main_grad"))
    norm = policy.update()["grad_norm"].value
    layout.close()
    return {name: gradient.numpy() for name, gradient in found.items()}, norm


def test_the_other_gradients_are_those_of_a_run_that_trains_routers():
    ((frozen, frozen_norm),), ((trained, norm),) = (run_ranks(gradients, 1, each) for each in (True, False))
    left_out = trained.keys() - frozen.keys()
    assert left_out == {name for name in trained if name.endswith("mlp.gate.weight")} != set()
    assert all(abs(trained[name]).max() > 0 for name in left_out) and frozen_norm < norm
    for name, gradient in frozen.items():
        assert (gradient == trained[name]).all(), name


def state_of_routers(settings: RunConfig, model: HfConfig) -> tuple[int, bool, int]:
    """The number of weights and biases of routers on this rank, whether two steps leave their bits, and how many of
    them have a gradient buffer or optimizer state."""
    layout = init_layout(settings.parallel)
    policy, batch, _ = prepare(settings, model, layout, few_samples())
    weights = [p for router in routers(policy.chunks) for p in router.parameters()]
    before = [p.detach().clone() for p in weights]
    for _ in range(2):
        policy.train_step(batch, policy_gradient, 1)
    same = all(torch.equal(*pair) for pair in zip(before, weights, strict=True))
    extra = sum(hasattr(p, "main_grad") or p.grad is not None or any(held_by(policy.optimizer, p)) for p in weights)
    layout.close()
    return len(weights), same, extra


@pytest.mark.parametrize(
    ("precision", "distributed"), usual([("fp32", False), ("bf16", True), ("fp32", True), ("bf16", False)], 1)
)
def test_routers_have_no_state_and_keep_their_bits(precision, distributed):
    train = dict(freeze_moe_router=True, distributed_optimizer=distributed, learning_rate=0.1)
    settings = tiny_run(dict(ep=2), model=dict(path="tiny", precision=precision), train=train)
    model = shrink_model(GPT_OSS, ParallelSection(ep=2))  # its routers have biases
    for count, same, extra in run_ranks(state_of_routers, 2, settings, model):
        assert count == 2 * len(model.experts.blocks) and same and extra == 0


@pytest.mark.full
@pytest.mark.parametrize(("saved", "loaded"), [(EP2, VPP_EP2)], ids=str)
def test_a_run_continues_from_a_checkpoint_of_another_layout(saved, loaded, tmp_path):
    run_ranks(_make_model_with_experts, 1, tmp_path / "model")
    assert_continues(saved, loaded, tmp_path / "model", tmp_path, train=dict(freeze_moe_router=True))


@pytest.mark.parametrize("frozen", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_run_may_freeze_routers_on_resume_but_not_train_frozen_ones(frozen, tmp_path):
    run_ranks(_make_model_with_experts, 1, tmp_path / "model")
    first, second = (partial(train_steps, train=dict(freeze_moe_router=each)) for each in (frozen, not frozen))
    run_ranks(first, 1, {}, tmp_path / "model", tmp_path, False)
    if not frozen:
        run_ranks(second, 1, {}, tmp_path / "model", tmp_path, True)
        return
    with pytest.raises(RankFailed, match=r"no optimizer state of routers; set train\.freeze_moe_router to true"):
        run_ranks(second, 1, {}, tmp_path / "model", tmp_path, True)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.full)])
def test_the_audit_agrees_with_the_gradient_norm(family, tmp_path, capfd):
    raw = GPT_OSS if family == "gpt_oss" else SHAPES[family]
    run_ranks(make_model, 1, tmp_path / "model", shrink_model(raw, ParallelSection(tp=2, pp=2, ep=2, etp=2)))
    run_ranks(dump, 2, raw, dict(ep=2), dict(train=dict(freeze_moe_router=True)), "engine", tmp_path)
    assert run_ranks(audit, 1, tmp_path, 1) == [0], capfd.readouterr().out


def test_the_plan_counts_no_state_of_routers():
    model = tiny_model("qwen3_moe")
    frozen, trained = (stage_memory(config(row_of(pp=2), frozen), model, 1)[1]["train"] for frozen in (True, False))
    blocks = [block for block in model.experts.blocks if block >= model.num_layers // 2]
    routers = len(blocks) * model.experts.count * model.hidden_size
    assert frozen["weights"] == trained["weights"] and routers > 0
    assert (trained["gradients"] - frozen["gradients"]) * 2**30 == pytest.approx(4 * routers)
    assert (trained["optimizer"] - frozen["optimizer"]) * 2**30 == pytest.approx(8 * routers)
