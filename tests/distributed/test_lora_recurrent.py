"""Adapters of Gated DeltaNet, Mamba-2 and attention with an output gate, whose rows Megatron orders in its own way:
against PEFT and over ranks."""

from functools import partial

import pytest
import torch
from ranks import run_ranks
from suites import usual
from test_lora_peft import _read_with_peft, _step, assert_as_peft, assert_resumes, make_with_peft

from megagrpo.families.shared.family import FULL, LINEAR
from tests.family_examples import TINY_EXPERTS

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "up_proj"]
SHAPE = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=20)
SHAPE |= dict(layer_types=[LINEAR, FULL] * 2, rms_norm_eps=1e-2)
MIXTURE = SHAPE | TINY_EXPERTS | dict(head_dim=8, shared_expert_intermediate_size=24)
GRANITE_H = dict(layer_types=[LINEAR, FULL] * 2, rms_norm_eps=1e-2, num_local_experts=0, shared_intermediate_size=40)
GRANITE_H |= dict(mamba_n_heads=8, mamba_d_head=12, mamba_d_state=6)
CASES = {
    "Qwen3Next": (MIXTURE, dict(target_modules=[*ATTENTION, "in_proj_qkvz", "in_proj_ba"])),
    "GraniteMoeHybrid": (
        GRANITE_H,
        dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"]),
    ),
    "Qwen3_5": (SHAPE, dict(target_modules=[*ATTENTION, *(f"in_proj_{part}" for part in ("qkv", "z", "b", "a"))])),
}


@pytest.fixture(scope="module", params=usual(CASES, 0))
def case(request, tmp_path_factory):
    """(PEFT's folder, gradients, merged weights, logits), and the selected adapters."""
    root, (shape, selection) = tmp_path_factory.mktemp(request.param), CASES[request.param]
    found = run_ranks(partial(make_with_peft, **selection), 1, root, request.param, shape, 0.1)[0]
    return (root, *found), selection


@pytest.mark.parametrize("parallel", usual([{}, dict(tp=2, sequence_parallel=True), dict(pp=2)], 1), ids=str)
def test_gradients_merged_weights_and_files_are_those_of_peft(parallel, case, tmp_path):
    made, selection = case
    assert_as_peft(parallel, made, tmp_path, selection)


@pytest.mark.full
@pytest.mark.parametrize("case", usual(CASES, 0), indirect=True)
def test_peft_reads_what_we_write_and_computes_the_same(case, tmp_path):
    (root, *_, logits), selection = case
    run_ranks(_step, 2, root, dict(tp=2, sequence_parallel=True), tmp_path / "out", selection)
    assert torch.equal(run_ranks(_read_with_peft, 1, root, tmp_path / "out", True)[0], logits)


@pytest.mark.parametrize("case", usual(CASES), indirect=True)
def test_a_run_continues_in_another_layout(case, tmp_path):
    made, selection = case
    assert_resumes(made[0], dict(tp=2, sequence_parallel=True), dict(pp=2), tmp_path, selection)
