"""Mixtures of experts: loss, every gradient tensor and the next weights of each expert-parallel layout equal those of one process."""

from pathlib import Path

import pytest
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_gradient_parity import assert_equal, relative_errors, run_step
from tiny_policy import Case, hf_folder

TP2 = dict(tp=2, sequence_parallel=True)
LAYOUTS = [
    Case("ep2", 2, dict(ep=2)),
    Case("ep4", 4, dict(ep=4)),
    Case("ep2_dp4", 4, dict(ep=2)),
    Case("tp2_etp1", 2, TP2 | dict(etp=1)),
    Case("tp2_ep2_etp1", 2, TP2 | dict(ep=2, etp=1)),
    Case("tp2_ep2_etp2", 4, TP2 | dict(ep=2, etp=2)),
    Case("etp2", 2, dict(etp=2)),
    Case("pp2_ep2", 4, dict(pp=2, ep=2)),
    Case("pp2_uneven_ep2", 4, dict(pp=2, ep=2, pipeline_layers=[1, 3])),
    Case("cp2_ep2", 2, dict(cp=2, ep=2)),
    Case("cp2_tp2_ep4_etp1", 4, TP2 | dict(cp=2, ep=4, etp=1)),
    Case("pp2_vpp2_ep2", 4, dict(pp=2, vpp=2, ep=2)),
    Case("full_recompute_ep2", 2, dict(ep=2), model=dict(recompute="full")),
    Case("shared_prompts_ep2", 2, dict(ep=2), share_prompts=True),
    Case("cp2_ep2", 2, dict(cp=2, ep=2)),
    Case("cp2_tp2_ep4_etp1", 4, TP2 | dict(cp=2, ep=4, etp=1)),
]
BY_NAME = {case.name: case for case in LAYOUTS}
IDLE = range(4, 8)  # of eight experts; with two expert-parallel ranks, all of the second one's


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Family -> (folder, what one process computes); made when first asked for."""
    made = {}

    def of(family: str) -> tuple[Path, dict]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            run_ranks(with_idle_experts if family == "idle experts" else hf_folder, 1, "qwen3_moe" if " " in family else family, folder)
            made[family] = folder, run_step(Case("one process", 1, {}), folder, folder / "one_process.pt")
        return made[family]

    return of


def with_idle_experts(family: str, folder: Path) -> None:
    """A checkpoint of two experts a token in which the experts IDLE get none: the other rows of each router come in pairs of w and -w, so
    two of them are above 0, and the rows of the idle ones are 0."""
    hf_folder(family, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        rows = tensors[name]
        rows[2:4] = -rows[:2]
        rows[IDLE.start :] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "case"),
    [*(("qwen3_moe", case) for case in LAYOUTS), *(("mixtral", BY_NAME[name]) for name in ("ep2_dp4", "tp2_ep2_etp1", "tp2_ep2_etp2"))],
    ids=str,
)
def test_every_gradient_and_next_weight_equals_one_process(family, case, one_process, tmp_path):
    folder, expected = one_process(family)
    assert all(g.norm() > 0 for g in expected["gradients"].values())
    assert_equal(run_step(case, folder, tmp_path / "found.pt"), expected)


@pytest.mark.parametrize("name", ["ep2_dp4", "tp2_ep2_etp1", "tp2_ep2_etp2"])
def test_the_distributed_optimizer_takes_the_same_step(name, one_process, tmp_path):
    folder, expected = one_process("qwen3_moe")
    found = run_step(BY_NAME[name], folder, tmp_path / "found.pt", distributed_optimizer=True)
    assert max(relative_errors(found["weights"], expected["weights"]).values()) < 1e-5
    assert found["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name", ["ep2", "tp2_ep2_etp1", "tp2_ep2_etp2", "pp2_ep2", "etp2"])
def test_experts_that_get_no_token_have_no_gradient_also_when_a_rank_has_no_other(name, one_process, tmp_path):
    folder, expected = one_process("idle experts")
    idle = {n for n, g in expected["gradients"].items() if g.norm() == 0}
    assert {int(n.split(".experts.")[1].split(".")[0]) for n in idle} == set(IDLE) and len(idle) == 3 * 3 * len(IDLE)
    found = run_step(BY_NAME[name], folder, tmp_path / "found.pt")
    assert {n for n, g in found["gradients"].items() if g.norm() == 0} == idle
    assert_equal(without_gradients_of(idle, found), without_gradients_of(idle, expected))


def without_gradients_of(names: set[str], step: dict) -> dict:
    return step | {"gradients": {name: gradient for name, gradient in step["gradients"].items() if name not in names}}
