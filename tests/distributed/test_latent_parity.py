"""Latent attention, shared experts and grouped experts: a step in every kind of layout equals one process's step."""

import functools

import pytest
import torch
from ranks import run_ranks
from suites import usual
from tiny_policy import Case, few_samples, tiny_run

from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.config import ParallelSection, RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.proof.verify.shrink import random_tensor, shrink_model
from megagrpo.proof.verify.verified_step import Outcome, prepare, take_step
from megagrpo.proof.verify.verify_compare import compare, silent_tensors
from megagrpo.weights.blocks.parameter_blocks import blocks

V3 = dict(
    model_type="deepseek_v3",
    num_hidden_layers=61,
    hidden_size=7168,
    num_attention_heads=128,
    num_key_value_heads=128,
    intermediate_size=18432,
    vocab_size=129280,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    rope_scaling=dict(type="yarn", factor=40, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.7),
)
V2_LITE = V3 | dict(
    model_type="deepseek_v2",
    q_lora_rank=None,
    rope_scaling=None,
    scoring_func="softmax",
    topk_method="greedy",
    n_group=1,
)
TP2 = dict(tp=2, sequence_parallel=True)
LAYOUTS = [
    Case("tp2_ep2_etp1", 2, TP2 | dict(ep=2, etp=1)),
    Case("tp2_cp2", 4, TP2 | dict(cp=2)),
    Case("pp2_ep2", 4, dict(pp=2, ep=2)),
    Case("cp2_shared_prompts", 2, dict(cp=2), train=dict(share_prompts=True)),
]


def model(raw: dict) -> HfConfig:
    return shrink_model(raw, ParallelSection(tp=2, pp=2, ep=2, etp=2))


def step(raw: dict, config: RunConfig, ranks: int) -> Outcome:
    return run_ranks(take_step, ranks, config, model(raw), few_samples())[0]


@functools.cache
def one_process(family: str) -> Outcome:
    outcome = step({"v3": V3, "v2_lite": V2_LITE}[family], Case("one process", 1, {}).config(), 1)
    assert silent_tensors(outcome) == []
    return outcome


@pytest.mark.parametrize("case", usual(LAYOUTS, 2), ids=str)
def test_every_layout_takes_the_step_of_one_process(case):
    found = step(V3, case.config(), case.ranks)
    assert [d for d in compare(found, one_process("v3")) if not d.passed] == []


@pytest.mark.full
def test_so_does_a_model_whose_queries_have_no_latent_with_its_attention_recomputed():
    config = tiny_run(
        TP2 | dict(ep=2), algorithm=dict(), model=dict(recompute="selective"), train=dict(share_prompts=True)
    )
    found = step(V2_LITE, config, 4)
    assert [d for d in compare(found, one_process("v2_lite")) if not d.passed] == []


def biases_after_a_step(precision: str) -> list[tuple[str, torch.Tensor]]:
    config, hf_config = tiny_run({}, model=dict(precision=precision)), model(V3)
    layout = init_layout(config.parallel)
    policy, batch, _ = prepare(config, hf_config, layout, few_samples())
    policy.backward(
        batch,
        make_loss(config.algorithm),
        denominator(batch, config.algorithm.loss.average, config.rollout.max_completion_length),
    )
    policy.update()
    held = [
        (found, value)
        for _, value, found in blocks(policy.chunks, hf_config, layout)
        if not isinstance(value, torch.nn.Parameter)
    ]
    layout.close()
    return [(block.name, value.numpy()) for (block,), value in held]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_biases_that_experts_are_chosen_by_stay_as_they_are_in_float32(precision):
    ((*found,),) = run_ranks(biases_after_a_step, 1, precision)
    assert [name for name, _ in found] == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    for name, value in found:
        assert torch.equal(torch.from_numpy(value), random_tensor(name, value.shape))
