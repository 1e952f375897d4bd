"""A run goes on when its only vLLM server is killed, and takes the steps that it would have taken."""

import os
import signal

import pytest

from tests.e2e import world
from tests.e2e.tiny_servers import below


def kill_server(trainer):
    """SIGKILL to all processes of the run's vLLM server, not to the supervisor above them."""
    (supervisor,) = [pid for pid in world.family(trainer.pid) if "supervisor.py" in open(f"/proc/{pid}/cmdline").read()]
    for pid in below(supervisor):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.full
def test_a_run_whose_server_is_killed_takes_the_same_steps(tmp_path):
    plain = world.train(tmp_path / "plain", "run.max_steps=6")
    with world.running(tmp_path / "killed", "run.max_steps=6", launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path / "killed") >= 2, "second step")
        kill_server(trainer)
        run = trainer.wait(seconds=240)
    assert run.code == 0, run.err
    assert "starting it again, 1 of 3 times" in run.out and "is back, with weight version" in run.out
    assert [row["completion"] for row in run.completions] == [row["completion"] for row in plain.completions]
    assert [line["weight_version"] for line in run.metrics] == [line["weight_version"] for line in plain.metrics]


@pytest.mark.full
def test_a_run_whose_server_may_not_be_started_again_ends_and_names_it(tmp_path):
    with world.running(tmp_path, "run.max_steps=1000", "rollout.max_restarts=0", launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 1, "first step")
        kill_server(trainer)
        run = trainer.wait(seconds=60)
    assert run.code == 1 and ("no vLLM server answers any more" in run.err or "did not reach the engine" in run.err), run.err
