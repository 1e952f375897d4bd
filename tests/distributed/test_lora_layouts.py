"""LoRA over ranks: gradients of every A and B, log-probs and the next adapters of a layout equal one process's."""

import functools

import pytest
from ranks import run_ranks
from tiny_policy import Case, few_samples, tiny_model, tiny_run

from megagrpo.planner.costs.shapes import modules_of
from megagrpo.proof.verify.shrink import plainly
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import compare, silent_tensors

SHARDED = dict(distributed_optimizer=True)
ALL = dict(rank=3)
EXPERTS = ALL | dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"])
ONLY_EXPERTS = dict(rank=2, target_modules=[], target_parameters=["experts.down_proj"])
CASES = [
    (Case("tp3", 3, dict(tp=3)), "llama_tied", ALL),
    (Case("tp2_sp_cp2", 4, dict(tp=2, cp=2, sequence_parallel=True), SHARDED), "qwen2_untied", ALL),
    (Case("pp2_vpp2", 2, dict(pp=2, vpp=2)), "llama_tied", ALL),
    (
        Case("pp2_dp2", 4, dict(pp=2), SHARDED),
        "qwen3_tied",
        dict(rank=2, target_modules=["q_proj", "v_proj"]),
    ),
    (Case("tp2_sp_pp2", 4, dict(tp=2, pp=2, sequence_parallel=True)), "phi3", ALL),
    (
        Case("tp2_sp", 2, dict(tp=2, sequence_parallel=True)),
        "qwen3_untied",
        dict(rank=2, target_modules=["k_proj", "up_proj", "down_proj"]),
    ),
    (Case("tp2_sp", 2, dict(tp=2, sequence_parallel=True)), "gemma2", ALL),
    (Case("pp2_dp2", 4, dict(pp=2), SHARDED), "llama_tied", dict(rank=2, layers_to_transform=[0])),
    (Case("tp2_sp_etp2_dp2", 4, dict(tp=2, sequence_parallel=True), SHARDED), "qwen3_moe", EXPERTS),
    (Case("tp2_ep2_cp2", 4, dict(tp=2, ep=2, etp=1, cp=2, sequence_parallel=True), SHARDED), "mixtral", EXPERTS),
    (Case("pp2_ep2", 4, dict(pp=2, ep=2)), "mixtral", ONLY_EXPERTS),
    (Case("tp2_sp_ep2", 2, dict(tp=2, ep=2, etp=1, sequence_parallel=True)), "qwen3_moe", ALL),
]


def config(parallel: dict, lora: dict, recompute: str, train: dict | None = None):
    return tiny_run(
        parallel, lora=lora, model=dict(recompute=recompute), train=dict(share_prompts=False) | (train or {})
    )


pytestmark = pytest.mark.full  # test_options_by_layouts.py has adapters by default


@functools.cache
def one_process(model: str, lora: str) -> Outcome:
    (found,) = run_ranks(take_step, 1, plainly(config({}, eval(lora), "none")), tiny_model(model), few_samples())
    assert silent_tensors(found) == []
    return found


@pytest.mark.parametrize(
    ("case", "model", "lora"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in CASES],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_of_adapters_equals_that_of_one_process(case, model, lora, recompute):
    expected = one_process(model, repr(lora))
    found = run_ranks(
        take_step, case.ranks, config(case.parallel, lora, recompute, case.train), tiny_model(model), few_samples()
    )[0]
    assert [d for d in compare(found, expected) if not d.passed] == []
    assert found.disagreement == 0
    small = tiny_model(model)
    names = [name.split(".")[-1] for name in modules_of(small, range(small.num_layers))]
    assert any(".mlp.experts." in name for name in found.gradients) == bool(lora.get("target_parameters"))
    others = {name.split(".")[-3] for name in found.gradients if ".mlp.experts." not in name}
    assert others == set(lora.get("target_modules", names))


def test_a_recomputed_step_of_adapters_on_the_first_stage_equals_it_too():
    """Nothing before the first block has a gradient: recomputation needs an input that requires one."""
    case, model, lora = CASES[3]
    found = run_ranks(
        take_step, case.ranks, config(case.parallel, lora, "full", case.train), tiny_model(model), few_samples()
    )[0]
    assert [d for d in compare(found, one_process(model, repr(lora))) if not d.passed] == []
