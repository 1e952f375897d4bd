"""Runs of a small mixture of experts with the experts that a real vLLM used: on demand, ahead, resumed, over two ranks,
with several optimizer steps, and audited."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

from megagrpo.__main__ import main
from tests.e2e import world
from tests.e2e.tiny_servers import mixture

REPLAY = "rollout.routing_replay=engine"


def moe_folder() -> Path:
    """A random mixture of experts with the world's tokenizer."""
    return mixture().folder


def server() -> str:
    return mixture().engine.urls[0]


def train(output: Path, *overrides: str) -> world.Run:
    model = f"model.path={moe_folder()}"
    done = world.train(output, f"rollout.urls=[{server()}]", model, *overrides)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("replayed"), REPLAY, "algorithm.beta=0.1", "debug.dump_steps=[1,2]")


def test_in_float32_the_routers_choose_what_vllm_chose(replayed):
    for line in replayed.metrics:
        assert line["routing/agreement"] > 0.999 and line["token_mult_prob_error"] < 1.0001


def test_the_audit_replays_the_routes_of_a_run(replayed):
    for step in (1, 2):
        code, said = world.audit(replayed.folder, "--step", step)
        assert code == 0 and said.splitlines()[-1] == "agrees: every quantity is within its tolerance", said


@pytest.mark.full
@pytest.mark.parametrize("options", [["algorithm.num_iterations=2"], ["algorithm.steps_per_generation=2"]], ids=str)
def test_the_trainers_own_routes_are_replayed_in_later_optimizer_steps(tmp_path, options):
    # with beta no sample is skipped, whatever the rounding of an advantage near 0
    run = train(tmp_path, "rollout.routing_replay=trainer", *options, "algorithm.beta=0.1", "debug.dump_steps=[2]")
    assert all(0.5 < line["routing/agreement"] < 1 for line in run.metrics)
    code, said = world.audit(run.folder, "--step", 2)
    assert code == 0, said


AHEAD = ("rollout.max_staleness=1", "rollout.placement=external", "algorithm.importance_correction=token_truncate")
AHEAD += ("algorithm.importance_correction_max=2",)


@pytest.mark.full
@pytest.mark.parametrize("in_flight", ["keep", "resume"])
def test_a_run_that_generates_ahead_replays_and_resumes(tmp_path, in_flight):
    ahead = (*AHEAD, REPLAY, f"rollout.in_flight={in_flight}", "rollout.max_num_seqs=4")
    train(tmp_path, *ahead, "run.max_steps=2", "run.save_steps=2")
    run = train(tmp_path, *ahead, "run.max_steps=4", "run.resume=true")
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    assert all(0 < line["routing/agreement"] <= 1 for line in run.metrics)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["parallel.pp=2", pytest.param("parallel.cp=2", marks=pytest.mark.full)])
def test_two_ranks_take_the_step_of_one(replayed, layout, tmp_path):
    overrides = (f"rollout.urls=[{server()}]", f"model.path={moe_folder()}", REPLAY, "algorithm.beta=0.1")
    words = ["train", *world.arguments(tmp_path, *overrides, layout, "debug.dump_steps=[2]")]
    assert run_ranks(main, 2, words) == [0, 0]
    run = world.Run(0, "", "", tmp_path / "run")
    for name in ("grad_norm", "loss", "routing/agreement"):
        assert run.metrics[0][name] == pytest.approx(replayed.metrics[0][name], rel=1e-4, abs=1e-5)
    code, said = world.audit(run.folder, "--step", 2)
    assert code == 0, said
