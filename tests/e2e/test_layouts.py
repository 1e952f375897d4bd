"""Two ranks take the same first step as one, with the real launcher, server and weight sync."""

import os
import signal

import pytest
from ranks import run_ranks

from megagrpo.__main__ import main
from tests.e2e import world

# keys that differ between runs or layouts
OWN = (*world.MEASURED, "packing/")


@pytest.fixture(scope="module")
def one_rank():
    """Two steps of one rank."""
    return world.plain()


def same_first_step(run, expected):
    assert run.code == 0, run.out + run.err
    assert [row["completion"] for row in run.completions[:16]] == [
        row["completion"] for row in expected.completions[:16]
    ]
    for name, value in expected.metrics[0].items():
        if not name.startswith(OWN) and not name.endswith("/seconds"):
            assert run.metrics[0][name] == pytest.approx(value, rel=1e-4, abs=1e-4), name
    assert len(run.metrics) == 2 and run.saved == ["step_000002"]
    code, said = world.audit(run.folder, "--step", 2)
    assert code == 0, said


@pytest.mark.full
def test_two_tensor_parallel_ranks(one_rank, tmp_path):
    same_first_step(world.finish(world.start(tmp_path, "parallel.tp=2", "debug.dump_steps=[2]"), tmp_path), one_rank)


@pytest.mark.parametrize("layout", ["parallel.pp=2", pytest.param("parallel.cp=2", marks=pytest.mark.full)])
def test_two_pipeline_stages_and_two_context_parallel_ranks(layout, one_rank, tmp_path):
    words = ["train", *world.arguments(tmp_path, layout, "debug.dump_steps=[2]")]
    codes = run_ranks(main, 2, words)
    same_first_step(world.Run(max(codes), "", "", tmp_path / "run"), one_rank)


@pytest.mark.full
def test_two_copies_of_the_model_and_a_signal_to_their_launcher(one_rank, tmp_path):
    process = world.start(tmp_path, "run.max_steps=1000", NPROC="2")
    world.wait_for(lambda: world.steps_done(tmp_path) >= 2 or process.poll() is not None, "second step")
    family = world.family(process.pid)
    os.kill(process.pid, signal.SIGTERM)
    run = world.finish(process, tmp_path)
    step = len(run.metrics)
    assert (run.code, run.saved) == (143, [f"step_{step:06d}"]), run.out + run.err
    world.wait_for(lambda: not any(map(world.alive, family)), "end of all processes", seconds=5)
    assert [row["prompt_id"] for row in run.completions[:16]] == [row["prompt_id"] for row in one_rank.completions[:16]]
    assert run.metrics[0]["loss"] == pytest.approx(one_rank.metrics[0]["loss"], abs=1e-4)
    assert run.metrics[0]["grad_norm"] == pytest.approx(one_rank.metrics[0]["grad_norm"], rel=1e-4)
    resumed = world.train(tmp_path, f"run.max_steps={step + 1}", "--resume")  # in another layout
    assert resumed.code == 0 and [line["step"] for line in resumed.metrics] == list(range(1, step + 2)), resumed.err
