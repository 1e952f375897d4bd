"""The load-balancing loss of the router: equal to transformers' for one batch, its gradient, and the same in every
layout."""

import functools
from pathlib import Path

import pytest
import torch
import transformers
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from suites import usual
from tiny_policy import SHAPES, few_samples, tiny_run
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megagrpo.config import ParallelSection, RunConfig
from megagrpo.families.hf_config import HfConfig, parse_hf_config
from megagrpo.proof.audit import naive
from megagrpo.proof.verify.shrink import random_tensor, shrink_model
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import compare

COEFFICIENT = 2.0
TP2 = dict(tp=2, sequence_parallel=True)


def config(parallel: dict, coefficient: float = COEFFICIENT, recompute: str = "none", **train) -> RunConfig:
    algorithm = dict(loss_type="grpo", beta=0.1, router_aux_loss_coef=coefficient)
    run = tiny_run(parallel, algorithm=algorithm, model=dict(path="tiny", precision="fp32", recompute=recompute))
    return run.model_copy(update=dict(train=run.train.model_copy(update=dict(distributed_optimizer=False) | train)))


LAYOUTS = {
    "ep2": (2, config(dict(ep=2))),
    "tp2_ep2_etp1": (2, config(TP2 | dict(ep=2, etp=1))),
    "pp2_vpp2_ep2": (4, config(dict(pp=2, vpp=2, ep=2))),
    "cp2_ep2": (2, config(dict(cp=2, ep=2))),
    "small_micro_batches_recompute": (
        1,
        config({}, recompute="full", max_tokens_per_micro_batch=32, share_prompts=False),
    ),
    "shared_prompts_dp2": (2, config({}, share_prompts=True)),
}


def model() -> HfConfig:
    return shrink_model(SHAPES["qwen3_moe"], ParallelSection(tp=2, pp=2, vpp=2, ep=2))


@functools.cache
def one_process(coefficient: float) -> Outcome:
    return run_ranks(take_step, 1, config({}, coefficient), model(), few_samples())[0]


def in_transformers(folder: Path) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The loss over positions whose next token is in a response, and its gradient by each router's weight, also from
    the audit."""
    raw = model().raw
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw)).save_pretrained(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    weights = {name: random_tensor(name, shape, config({}).rollout.temperature) for name, shape in shapes.items()}
    # weights at the start of the step
    moved = {name: weight + 0.02 * torch.sin(40 * weight) for name, weight in weights.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    policy, samples = naive.load_model(folder, "float32"), few_samples()
    found = [policy(sample.token_ids[None], output_router_logits=True).router_logits for sample in samples]
    masks = []
    for sample in samples:
        before_a_response = sample.response_mask.roll(-1)
        before_a_response[-1] = False
        masks.append(before_a_response)
    logits = tuple(torch.cat(layer) for layer in zip(*found, strict=True))
    loss = load_balancing_loss_func(
        logits, raw["num_experts"], raw["num_experts_per_tok"], attention_mask=torch.cat(masks)[None].long()
    )
    loss.backward()
    theirs = gradients_of_routers(policy)
    rows = torch.cat(
        [naive.router_logits(policy, s.token_ids, s.response_mask.nonzero()[:, 0], None, {}) for s in samples]
    ).softmax(dim=-1)
    (rows @ naive.balancing_slope(rows.detach(), raw["num_experts_per_tok"])).sum().backward()
    return loss.item(), theirs, gradients_of_routers(policy)


def gradients_of_routers(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if name.endswith("mlp.gate.weight")}
    policy.zero_grad()
    return found


def test_the_loss_and_its_gradient_are_those_of_transformers(tmp_path):
    balanced, plain = one_process(COEFFICIENT), one_process(0.0)
    ((loss, gradients, audited),) = run_ranks(in_transformers, 1, tmp_path)
    assert balanced.metrics["aux_loss"] == pytest.approx(loss, rel=1e-5)
    assert "aux_loss" not in plain.metrics and balanced.metrics["loss"] == plain.metrics["loss"]
    assert len(gradients) == len(model().experts.blocks) > 1
    for name, expected in gradients.items():
        found = (balanced.gradients[name] - plain.gradients[name]) / COEFFICIENT
        assert ((found - expected).norm() / expected.norm()).item() < 1e-4, name
        torch.testing.assert_close(audited[name], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", usual(LAYOUTS, 4))
def test_the_balanced_gradient_is_the_same_in_every_layout(name):
    ranks, settings = LAYOUTS[name]
    found = run_ranks(take_step, ranks, settings, model(), few_samples())[0]
    assert [d for d in compare(found, one_process(COEFFICIENT)) if not d.passed] == []


def test_a_stage_without_experts_takes_part_in_the_balance():
    shape = model()
    dense = list(range(shape.num_layers // 2))
    half = parse_hf_config(shape.raw | {"mlp_only_layers": dense})
    assert [*half.experts.blocks] == list(range(len(dense), shape.num_layers)), "the first stage has experts"
    expected = run_ranks(take_step, 1, config({}), half, few_samples())[0]
    found = run_ranks(take_step, 2, config(dict(pp=2)), half, few_samples())[0]
    assert [d for d in compare(found, expected) if not d.passed] == []
