"""Selection biases of experts move by the loads of all ranks' response tokens, alike in every layout, and nothing
else moves them."""

import functools
import itertools

import pytest
import torch
from dumped_steps import make_model
from ranks import run_ranks
from suites import usual
from test_checkpoint_layouts import EP2, PP2_EP2, SIZES, TP2_EP2, assert_continues
from test_dump_layouts import audit
from test_latent_parity import V3, model
from test_routing_replay import dump
from tiny_policy import RELEASED, few_samples, tiny_run, whole_model

from megagrpo.algorithms.losses import make_loss
from megagrpo.config import ParallelSection, RunConfig
from megagrpo.families.hf_config import HfConfig, parse_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.model_state import sharded_state
from megagrpo.policy.moe.router_losses import selection_biases
from megagrpo.policy.moe.routing_replay import route_shape
from megagrpo.policy.reference import Reference
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.proof.verify.shrink import random_routes, random_tensor
from megagrpo.proof.verify.verified_step import Outcome, prepare, take_step
from megagrpo.weights.bridge.megatron_io import METADATA

RATE = 0.25
TP2 = dict(tp=2, sequence_parallel=True)
LAYOUTS = {
    "dp2_ep2": (2, dict(ep=2), dict(distributed_optimizer=True)),
    "tp2_ep2_etp1": (2, TP2 | dict(ep=2, etp=1), {}),
    "tp2_cp2": (4, TP2 | dict(cp=2), {}),
    "pp2_ep2_shared_prompts": (4, dict(pp=2, ep=2), dict(share_prompts=True)),
    "small_micro_batches": (1, {}, dict(max_tokens_per_micro_batch=32)),
}


def config(parallel: dict, train: dict, replay: str = "off", rate: float = RATE, recompute: str = "none") -> RunConfig:
    made = tiny_run(
        parallel,
        algorithm=dict(loss_type="grpo", beta=0.1, moe_router_bias_update_rate=rate),
        model=dict(path="tiny", precision="fp32", recompute=recompute),
        rollout=dict(temperature=0.8, routing_replay=replay),
    )
    return made.model_copy(update=dict(train=made.train.model_copy(update=dict(distributed_optimizer=False) | train)))


def biases(outcome: Outcome) -> dict[str, torch.Tensor]:
    return {name: value for name, value in outcome.weights.items() if name.endswith("e_score_correction_bias")}


@functools.cache
def one_process(replay: str) -> Outcome:
    return run_ranks(take_step, 1, config({}, {}, replay), model(V3), few_samples())[0]


@pytest.mark.parametrize("replay", usual(["off", "engine"], 1))
@pytest.mark.parametrize("name", usual(LAYOUTS, 0))
def test_biases_move_alike_in_every_layout(name, replay):
    ranks, parallel, train = LAYOUTS[name]
    settings = config(parallel, train, replay, recompute="full")
    found = run_ranks(take_step, ranks, settings, model(V3), few_samples())[0]
    expected = biases(one_process(replay))
    assert biases(found).keys() == expected.keys() and expected
    for key, value in expected.items():
        assert torch.equal(biases(found)[key], value), key


def test_biases_move_by_the_loads_of_replayed_routes():
    shape, samples = route_shape(model(V3)), few_samples()
    routes, moved = random_routes(samples, shape), biases(one_process("engine"))
    assert len(moved) == len(shape.layers)
    for column, layer in enumerate(shape.layers):
        load = [0] * shape.experts
        for sample in samples:
            for position in (sample.response_mask.nonzero()[:, 0] - 1).tolist():
                for expert in routes[sample.index][position][column].tolist():
                    load[expert] += 1
        mean = sum(load) / len(load)
        assert max(load) > mean, "no expert is loaded more than the others"
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        before = random_tensor(name, (shape.experts,))
        signs = torch.tensor([1 if one < mean else -1 if one > mean else 0 for one in load])
        torch.testing.assert_close(moved[name].float(), before + RATE * signs, atol=1e-6, rtol=0)


def biases_of_a_checkpoint(hf_config: HfConfig) -> list[str]:
    layout = init_layout(ParallelSection())
    (chunk,) = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, init_weights=False))
    state = sharded_state(chunk, METADATA | {"dp_cp_group": layout.dp_cp_group}, adapters_only=False)
    found = [key for key in state if key.endswith("router.expert_bias")]
    layout.close()
    return found


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe"])
def test_the_biases_of_sigmoid_and_of_softmax_routers_belong_to_a_checkpoint(family):
    small = model(dict(deepseek_v3=V3, ernie4_5_moe=RELEASED["ernie4_5_moe"])[family])
    assert small.experts.bias and small.experts.softmax_bias == (family == "ernie4_5_moe")
    (found,) = run_ranks(biases_of_a_checkpoint, 1, small)
    assert len(found) == len(route_shape(small).layers) > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("saved", "loaded"), [(EP2, PP2_EP2), pytest.param(TP2_EP2, EP2, marks=pytest.mark.full)], ids=str
)
def test_checkpoints_hold_the_biases(saved, loaded, tmp_path):
    """Without them the biases after the second step would lack the first step's move."""
    shape = parse_hf_config(model(V3).raw | dict(vocab_size=SIZES["vocab_size"]))
    run_ranks(make_model, 1, tmp_path / "model", shape)
    algorithm = dict(moe_router_bias_update_rate=RATE)
    after = assert_continues(saved, loaded, tmp_path / "model", tmp_path, algorithm=algorithm)
    moved = [name for name in after if name.endswith("e_score_correction_bias")]
    assert len(moved) == len(route_shape(model(V3)).layers)


@pytest.mark.full
def test_the_audit_uses_the_biases_of_each_optimizer_step(tmp_path, capfd):
    run_ranks(make_model, 1, tmp_path / "model", model(V3))
    algorithm = dict(moe_router_bias_update_rate=RATE)
    run_ranks(dump, 2, V3, dict(ep=2), dict(algorithm=algorithm), "off", tmp_path)
    assert run_ranks(audit, 1, tmp_path, 1) == [0], capfd.readouterr().out


def two_steps() -> tuple[list[float], bool, bool]:
    """How far each of two steps, whose gradients are computed twice, moves the biases of each layer, whether the
    reference's log-probs stay, and whether the tensors that exports and weight syncs read have the biases."""
    settings = config({}, {})
    layout = init_layout(settings.parallel)
    policy, batch, _ = prepare(settings, model(V3), layout, few_samples())
    reference, seen = Reference(policy), [[b.clone() for b in selection_biases(policy.chunks)]]
    before = reference.logprobs(batch)
    for _ in range(2):
        policy.backward(batch, make_loss(settings.algorithm), batch.num_tokens)
        policy.train_step(batch, make_loss(settings.algorithm), batch.num_tokens)
        seen.append([b.clone() for b in selection_biases(policy.chunks)])
    same = all(torch.equal(*pair) for pair in zip(before, reference.logprobs(batch), strict=True))
    exported = [t for name, t in whole_model(policy) if name.endswith("e_score_correction_bias")]
    equal = all(torch.equal(*pair) for pair in zip(exported, seen[-1], strict=True))
    layout.close()
    pairs = [pair for step in itertools.pairwise(seen) for pair in zip(*step, strict=True)]
    return [(after - before).abs().max().item() for before, after in pairs], same, equal


def test_each_optimizer_step_moves_biases_once_and_the_reference_keeps_its_own():
    ((moved, same, equal),) = run_ranks(two_steps, 1)
    assert same and equal and len(moved) == 2 * len(route_shape(model(V3)).layers)
    assert moved == pytest.approx([RATE] * len(moved), abs=1e-6)
