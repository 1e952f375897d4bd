"""A run continues when its only vLLM server is killed, and takes the same steps as without the kill."""

import os
import signal

import pytest

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.servers import restarts
from megagrpo.platform.rendezvous.store_exchange import Exchange
from megagrpo.sync.trainer_side.point_to_point import PointToPoint
from tests.e2e import world
from tests.e2e.tiny_servers import below


def processes_of_server(trainer_pid):
    """All processes of the run's vLLM server, the API server first, without the supervisor."""
    (supervisor,) = [pid for pid in world.family(trainer_pid) if "supervisor.py" in open(f"/proc/{pid}/cmdline").read()]
    return below(supervisor)


def kill_server(trainer_pid, number=signal.SIGKILL):
    """Send a signal to all processes of the run's vLLM server."""
    for pid in processes_of_server(trainer_pid):
        os.kill(pid, number)


def in_the_third_update(strike, url=None):
    """Called in the trainer: calls `strike` when a server, or the one at `url`, is about to get weights for the third
    time."""
    post, updates = VllmEngine._request, []

    def disturbed(self, client, asked, path, *args, **kwargs):
        if path == "/update_weights" and url in (None, asked):
            updates.append(path)
            if len(updates) == 3:
                strike()
        return post(self, client, asked, path, *args, **kwargs)

    VllmEngine._request = disturbed


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("p2p", marks=pytest.mark.full)])
def test_a_run_whose_server_is_killed_takes_the_same_steps(transport, tmp_path):
    options = ["run.max_steps=6", f"rollout.weight_sync_transport={transport}"]
    plain = world.train(tmp_path / "plain", *options)
    with world.running(tmp_path / "killed", *options, launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path / "killed") >= 2, "second step")
        kill_server(trainer.pid)
        run = trainer.wait(seconds=240)
    assert run.code == 0, run.err
    back = (
        "is back, with weight version" if transport == "shared_memory" else "is back and waits for the next weight sync"
    )
    assert "restarting it, 1 of 3 times" in run.out and back in run.out
    assert_same_steps(run, plain)


@pytest.mark.full
def test_a_run_whose_server_may_not_be_started_again_ends_and_names_it(tmp_path):
    with world.running(tmp_path, "run.max_steps=1000", "rollout.max_restarts=0", launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 1, "first step")
        kill_server(trainer.pid)
        run = trainer.wait(seconds=60)
    assert run.code == 1 and (
        "no vLLM server responds any longer" in run.err or "did not reach the engine" in run.err
    ), run.err


def assert_same_steps(run, plain):
    """The completions and the weight versions of two runs are equal."""
    assert [row["completion"] for row in run.completions] == [row["completion"] for row in plain.completions]
    assert [line["weight_version"] for line in run.metrics] == [line["weight_version"] for line in plain.metrics]


def hang_in_the_third_update():
    """Called in the trainer: stops its server with SIGSTOP until the restart thread kills it."""
    pid, restarts.KILL_SILENT_SECONDS = os.getpid(), 2.0
    in_the_third_update(lambda: kill_server(pid, signal.SIGSTOP))


@pytest.mark.full
def test_a_run_whose_server_hangs_in_a_sync_ends_it_and_takes_the_same_steps(tmp_path):
    options = ["run.max_steps=4", "rollout.weight_sync_timeout=3"]
    plain = world.train(tmp_path / "plain", *options)
    run = world.train(tmp_path / "hung", *options, prepare=hang_in_the_third_update, launched=True)
    assert run.code == 0, run.err
    assert "no response for 2 s; killing it" in run.out and "restarting it, 1 of 3 times" in run.out
    assert_same_steps(run, plain)


def die_in_the_fourth_sync():
    """Called in the trainer: kills its server between two messages of that sync."""
    prepare, send, pid, sent = PointToPoint.prepare, Exchange.send, os.getpid(), []

    def begin(self, found, version, engine):
        sent.append(0)
        return prepare(self, found, version, engine)

    def disturbed(self, buffers):
        sent[-1] += 1
        if len(sent) == 4 and sent[-1] == 2:
            kill_server(pid)
        return send(self, buffers)

    PointToPoint.prepare, Exchange.send = begin, disturbed


@pytest.mark.full
def test_a_run_over_p2p_whose_server_is_killed_in_a_sync_takes_the_same_steps(tmp_path):
    options = ["run.max_steps=5", "rollout.weight_sync_transport=p2p", "rollout.weight_sync_bucket_megabytes=0.1"]
    plain = world.train(tmp_path / "plain", *options)
    run = world.train(tmp_path / "killed", *options, prepare=die_in_the_fourth_sync, launched=True)
    assert run.code == 0, run.err
    assert (
        "a vLLM server died during a weight sync; restarting the sync" in run.out
        and "waits for the next weight sync" in run.out
    )
    assert_same_steps(run, plain)


@pytest.mark.full
def test_two_ranks_that_ask_a_server_that_is_killed_give_it_its_weights_again_together(tmp_path):
    options = ["run.max_steps=8", "rollout.weight_sync_transport=p2p"]
    plain = world.finish(world.start(tmp_path / "plain", *options, NPROC="2"), tmp_path / "plain")
    killed = world.start(tmp_path / "killed", *options, launched=True, NPROC="2")
    for step in (2, 5):
        world.wait_for(lambda step=step: world.steps_done(tmp_path / "killed") >= step, f"step {step}", seconds=120)
        kill_server(killed.pid)
    run = world.finish(killed, tmp_path / "killed", seconds=240)
    assert run.code == 0, run.err
    assert "restarting it, 2 of 3 times" in run.out
    assert [row["completion"] for row in run.completions] == [row["completion"] for row in plain.completions]
    assert [line["loss"] for line in run.metrics] == [line["loss"] for line in plain.metrics]
