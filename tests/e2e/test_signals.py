"""Ctrl-C, SIGTERM and SIGKILL at any moment: what is saved, how the run ends, and that no process is left running."""

import os
import signal
import time

import pytest

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import EngineInterrupted
from megagrpo.trainer.policy_update import Learning
from megagrpo.trainer.saving import time_limit
from megagrpo.types import Prompt, SamplingParams
from tests.e2e import world
from tests.e2e.test_server_dies import kill_server

LONG = ["run.max_steps=1000", "run.save_steps=2", "run.save_total_limit=1", "run.async_save=true"]


def continues(output, step, *overrides):
    """Assert that the run in `output` resumes after `step` and takes two more steps."""
    run = world.train(output, f"run.max_steps={step + 2}", "--resume", *overrides)
    assert run.code == 0, run.err
    assert [line["step"] for line in run.metrics] == list(range(1, step + 3))
    assert sorted({row["step"] for row in run.completions}) == list(range(1, step + 3))


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGTERM, os.kill),
        pytest.param(signal.SIGTERM, os.killpg, marks=pytest.mark.full),
        pytest.param(signal.SIGINT, os.killpg, marks=pytest.mark.full),
    ],
    ids=["SIGTERM", "SIGTERM to the group", "SIGINT to the group"],
)
def test_a_signal_saves_after_the_last_finished_step(number, to, tmp_path):
    with world.running(tmp_path, *LONG) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 3, "third step")
        family = world.family(trainer.pid)
        to(trainer.pid, number)
        run = trainer.wait()
    assert run.code == 128 + number, run.err
    step = len(run.metrics)
    assert f"stop requested ({number.name}) after step {step}" in run.out and "Traceback" not in run.err
    assert run.saved == [f"step_{step:06d}"]
    assert not world.weights_in_shared_memory(trainer.pid)
    world.wait_for(lambda: not any(map(world.alive, family)), "end of all processes", seconds=5)
    continues(tmp_path, step)


def reported(folder):
    """Return whether a worker of the engine has logged a weight update."""
    return any(folder.glob("replies/*/worker*.json"))


@pytest.mark.full
def test_a_signal_to_servers_and_trainer_at_once_saves_after_the_last_finished_step(tmp_path):
    with world.running(tmp_path, "run.max_steps=1000", launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 3, "third step")
        for pid in world.family(trainer.pid):
            os.kill(pid, signal.SIGTERM)
        run = trainer.wait()
    assert run.code == 143, run.err
    assert run.saved == [f"step_{len(run.metrics):06d}"]


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared_memory", "p2p"])
def test_a_run_that_is_stopped_without_a_server_does_not_wait_for_a_new_one(transport, tmp_path):
    asked = tmp_path / "asked"

    def prepare():
        move = Learning.move_reference

        def moved(self):  # the last part of a step before its weight sync
            move(self)
            if self.state.step == 1:
                kill_server(os.getpid())
                asked.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGTERM)

        Learning.move_reference = moved

    options = ["run.max_steps=1000", f"rollout.weight_sync_transport={transport}"]
    run = world.train(tmp_path, *options, prepare=prepare, launched=True)
    ended = time.time()
    assert run.code == 143, run.err
    assert ended - float(asked.read_text()) < 15  # a new server takes longer
    assert run.saved == ["step_000002"] and [line["step"] for line in run.metrics] == [1, 2]


def test_a_signal_does_not_wait_for_a_long_generation(tmp_path):
    slow = ["rollout.max_num_seqs=1", "rollout.prompts_per_step=2400", "rollout.num_generations=16", "run.max_steps=5"]
    with world.running(tmp_path, *slow) as trainer:
        world.wait_for(lambda: [*map(reported, world.weights_in_shared_memory(trainer.pid))] == [True], "first sync")
        time.sleep(1)
        os.kill(trainer.pid, signal.SIGTERM)
        asked = time.monotonic()
        run = trainer.wait()
        seconds = time.monotonic() - asked
    assert run.code == 143 and "after step 0" in run.out and run.saved == [] and run.completions == []
    assert seconds < 3
    assert world.train(tmp_path, "run.max_steps=1", "run.overwrite=true").code == 0  # the server still works


@pytest.mark.full
def test_an_evaluation_that_a_stop_broke_off_is_done_when_the_run_goes_on(tmp_path):
    evaluated = ["evaluation.steps=1", f"data.eval={{source: {world.folder()}/eval.jsonl}}", "evaluation.temperature=1"]
    many = [*evaluated, "evaluation.num_generations=64"]  # takes longer than the signal
    with world.running(tmp_path, *many, "run.max_steps=1000") as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 1, "first step")
        os.kill(trainer.pid, signal.SIGTERM)
        run = trainer.wait()
    assert run.code == 143, run.err
    done = len(run.metrics)
    resumed = world.train(tmp_path, *many, f"run.max_steps={done + 1}", "--resume")
    assert resumed.code == 0, resumed.err
    steps = [line["step"] for line in resumed.lines if "eval/reward" in line]
    assert steps == list(range(done + 2))


def test_a_run_saves_before_its_time_is_over(tmp_path):
    def prepare():
        os.environ.pop("SLURM_JOB_END_TIME", None)
        time_limit.FIRST_SAVE_SECONDS, time_limit.SPARE_SECONDS = 0.5, 0.5

    began = time.monotonic()
    run = world.train(tmp_path, "run.time_limit=0:00:06", "run.max_steps=10000", prepare=prepare)
    assert time.monotonic() - began < 8
    assert run.code == 85, run.err
    step = len(run.metrics)
    assert f"the time limit is near after step {step}" in run.out and run.saved == [f"step_{step:06d}"] and step > 0


def test_a_run_that_its_scheduler_ends_is_continued_by_the_same_job_and_by_no_other(tmp_path):
    job = lambda: os.environ.update(MEGAGRPO_JOB="slurm-1")  # noqa: E731
    with world.running(tmp_path, *LONG, prepare=job) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 1, "first step")
        os.kill(trainer.pid, signal.SIGTERM)
        run = trainer.wait()
    assert run.code == 85, run.err
    step = len(run.metrics)
    other = world.train(
        tmp_path, f"run.max_steps={step + 1}", prepare=lambda: os.environ.update(MEGAGRPO_JOB="slurm-2")
    )
    assert other.code == 2 and "holds an earlier run" in other.err
    run = world.train(tmp_path, f"run.max_steps={step + 1}", prepare=job)
    assert run.code == 0 and f"after step {step}" in run.out and len(run.metrics) == step + 1


def test_an_engine_that_was_interrupted_generates_no_more():
    engine = VllmEngine([world.server()], str)
    engine.interrupt()
    with pytest.raises(EngineInterrupted):
        engine.generate([Prompt(0, (5, 6, 7), "")], 1, SamplingParams(1.0, 8), seed=0)


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    own = (
        f"rewards.functions=[{{function: {world.folder()}/rewards.py:slow, args: {{seconds: 600, started: "
        f"{tmp_path}/started}}}}]"
    )
    with world.running(tmp_path, own, "rewards.timeout=700") as trainer:
        world.wait_for(lambda: (tmp_path / "started").exists(), "reward under way")
        time.sleep(3)  # while others are still generating, the step stops at the first one
        family = world.family(trainer.pid)
        os.kill(trainer.pid, signal.SIGINT)
        time.sleep(0.5)
        assert world.alive(trainer.pid)
        os.kill(trainer.pid, signal.SIGINT)
        run = trainer.wait(seconds=10)
    assert run.code == 130 and "interrupted" in run.err and "Traceback" not in run.err
    world.wait_for(lambda: not any(map(world.alive, family)), "end of all processes", seconds=5)


@pytest.mark.full
def test_nothing_outlives_a_killed_trainer_and_its_run_goes_on(tmp_path):
    with world.running(tmp_path, *LONG, launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 3, "third step")
        family = world.family(trainer.pid)
        files = world.shared_memory(family)
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        assert len(family) >= 6 and len(files) >= 3  # trainer, reward worker, supervisor, and vLLM's processes
        world.wait_for(lambda: not any(map(world.alive, family)), "end of all processes", seconds=15)
        world.wait_for(lambda: not any(file.exists() for file in files), "end of all files in shared memory", seconds=5)
    (saved,) = [path for path in (tmp_path / "run" / "checkpoints").glob("step_*")]
    continues(tmp_path, int(saved.name.removeprefix("step_")))
