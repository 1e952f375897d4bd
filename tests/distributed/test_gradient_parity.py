"""Loss, every gradient tensor and the next weights of each parallel layout equal those of one process."""

import os
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny_policy import Case, config, full_tensors, hf_folder, old_logprobs, packing_rules, samples

from megagrpo.algorithms.losses import denominator, make_loss
from megagrpo.bridge.load import load_hf
from megagrpo.data.packing import pack
from megagrpo.parallel.layout import init_layout
from megagrpo.policy import context_attention
from megagrpo.policy.hf_config import load_hf_config
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference

LAYOUTS = [
    Case("tp2", 2, dict(tp=2)),
    Case("tp3", 3, dict(tp=3)),
    Case("pp2", 2, dict(pp=2)),
    Case("dp2", 2, dict()),
    Case("tp2_pp2", 4, dict(tp=2, pp=2)),
    Case("tp2_sequence_parallel", 2, dict(tp=2, sequence_parallel=True)),
    Case("pp2_vpp2", 2, dict(pp=2, vpp=2)),
    Case("tp2_dp2", 4, dict(tp=2)),
    Case("cp2", 2, dict(cp=2)),
    Case("cp4", 4, dict(cp=4)),
    Case("cp2_tp2_sequence_parallel", 4, dict(cp=2, tp=2, sequence_parallel=True)),
    Case("cp2_pp2", 4, dict(cp=2, pp=2)),
    Case("cp2_pp2_vpp2", 4, dict(cp=2, pp=2, vpp=2)),
    Case("cp2_dp2", 4, dict(cp=2)),
    Case("cp2_recompute", 2, dict(cp=2), model=dict(recompute="selective")),
    Case("cp2_shared_prompts", 2, dict(cp=2), share_prompts=True),
    Case("full_recompute", 1, dict(), model=dict(recompute="full")),
    Case("selective_recompute", 1, dict(), model=dict(recompute="selective")),
    Case("small_micro_batches", 1, dict(), train=dict(max_tokens_per_micro_batch=40)),
    Case("shared_prompts", 1, dict(), share_prompts=True),
    Case("shared_prompts_tp2_sequence_parallel", 2, dict(tp=2, sequence_parallel=True), share_prompts=True),
    Case("shared_prompts_pp2", 2, dict(pp=2), share_prompts=True),
    Case("shared_prompts_recompute", 1, dict(), model=dict(recompute="full"), share_prompts=True),
]


def one_step(case: Case, folder: str, distributed_optimizer: bool) -> dict:
    """Loss and metrics of one GRPO step, every gradient and every next weight as full Hugging Face tensors, on rank 0."""
    settings = config(case, num_iterations=2)
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"distributed_optimizer": distributed_optimizer})})
    layout = init_layout(settings.parallel)
    hf_config = load_hf_config(folder)
    policy = MegatronPolicy(settings, layout, hf_config)
    load_hf(policy.chunks, hf_config, folder, layout)
    reference = Reference(policy)
    _perturb(policy)
    policy.weights_changed()
    rules = packing_rules(case, settings)
    batch = pack(samples(), rules, layout.dp_rank, layout.dp_size)
    batch = batch.with_logprobs(old=[old_logprobs(m) for m in batch.micro_batches], ref=reference.logprobs(batch))
    divisor = denominator(batch, settings.algorithm.loss_type, settings.rollout.max_completion_length)
    metrics = policy.train_step(batch, make_loss(settings), divisor)
    gradients = full_tensors(policy, hf_config, layout, lambda p: p.main_grad) if not distributed_optimizer else {}
    weights = full_tensors(policy, hf_config, layout, lambda p: p.data)
    layout.close()
    return {"metrics": metrics, "gradients": gradients, "weights": weights}


@torch.no_grad()
def _perturb(policy) -> None:
    """Move the policy away from the reference: a function of each weight alone, so that every layout moves alike."""
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.add_(0.02 * torch.sin(40 * parameter))


def _save_step(case: Case, folder: str, distributed_optimizer: bool, out: str) -> None:
    result = one_step(case, folder, distributed_optimizer)
    if os.environ["RANK"] == "0":
        torch.save(result, out)


def run_step(case: Case, folder: Path, out: Path, distributed_optimizer: bool = False) -> dict:
    run_ranks(_save_step, case.ranks, case, str(folder), distributed_optimizer, str(out))
    return torch.load(out)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def one_process(request, tmp_path_factory):
    folder = hf_folder(request.param, tmp_path_factory.mktemp(request.param))
    return folder, run_step(Case("one process", 1, {}), folder, folder / "one_process.pt")


def relative_errors(found: dict, expected: dict) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {name: ((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected}


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_gradient_and_next_weight_equals_one_process(one_process, case, tmp_path):
    folder, expected = one_process
    assert all(g.norm() > 0 for g in expected["gradients"].values())
    assert_equal(run_step(case, folder, tmp_path / "found.pt"), expected)


def assert_equal(found: dict, expected: dict) -> None:
    """Every gradient, next weight and metric of two results of `one_step`."""
    for part in ("gradients", "weights"):
        errors = relative_errors(found[part], expected[part])
        worst = max(errors, key=errors.get)
        assert errors[worst] < 1e-5, f"{part}, {worst}: {errors[worst]:.1e}"
    for name, value in expected["metrics"].items():
        assert found["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


UNEVEN = [
    Case("pp2_uneven", 2, dict(pp=2, pipeline_layers=[2, 3])),
    Case("pp3_uneven_cp2", 6, dict(pp=3, cp=2, pipeline_layers=[1, 3, 1])),
    Case("pp2_vpp2_uneven", 2, dict(pp=2, vpp=2, pipeline_layers=[1, 2, 1, 1])),
]


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory):
    """A model whose layers no number of stages divides, and its step in one process."""
    folder = tmp_path_factory.mktemp("five_layers")
    run_ranks(hf_folder, 1, "llama", folder, dict(num_hidden_layers=5))
    return folder, run_step(Case("one process", 1, {}), folder, folder / "one_process.pt")


@pytest.mark.parametrize("case", UNEVEN, ids=str)
def test_stages_may_hold_any_number_of_layers(five_layers, case, tmp_path):
    folder, expected = five_layers
    assert_equal(run_step(case, folder, tmp_path / "found.pt"), expected)


def _step_with_slices_in_order(case: Case, folder: str, distributed_optimizer: bool, out: str) -> None:
    context_attention.gathered_places = lambda cu_seqlens, cp_size: torch.arange(int(cu_seqlens[-1]))
    _save_step(case, folder, distributed_optimizer, out)


def test_keys_that_are_not_put_back_in_order_are_seen_in_the_gradients(one_process, tmp_path):
    folder, expected = one_process
    run_ranks(_step_with_slices_in_order, 2, Case("cp2", 2, dict(cp=2)), str(folder), False, str(tmp_path / "wrong.pt"))
    wrong = torch.load(tmp_path / "wrong.pt")
    assert max(relative_errors(wrong["gradients"], expected["gradients"]).values()) > 0.1
    assert abs(wrong["metrics"]["loss"] / expected["metrics"]["loss"] - 1) > 1e-3


SHARDED = [case for case in LAYOUTS if case.name in ("dp2", "tp2_dp2", "cp2_dp2")]


@pytest.mark.parametrize("case", SHARDED, ids=str)
def test_the_distributed_optimizer_takes_the_same_step(one_process, case, tmp_path):
    folder, expected = one_process
    found = run_step(case, folder, tmp_path / "found.pt", distributed_optimizer=True)
    assert max(relative_errors(found["weights"], expected["weights"]).values()) < 1e-5
    assert found["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=1e-5)
