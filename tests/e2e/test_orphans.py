"""vLLM's processes end with their supervisor, whatever kills it, and leave neither ports nor shared memory."""

import os
import re
import signal
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e import world
from tests.e2e.test_server_dies import assert_same_steps, in_the_third_update
from tests.e2e.tiny_servers import WORKERS_SHARE_MEMORY, below


def supervisor_of(pid):
    (found,) = [child for child in world.family(pid) if "supervisor.py" in Path(f"/proc/{child}/cmdline").read_text()]
    return found


def is_free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def port_of(supervisor):
    """The port on which the API server below this process listens for HTTP."""
    sockets = psutil.Process(below(supervisor)[0]).net_connections("tcp")
    (port,) = {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN and answers(each.laddr.port)}
    return port


def answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_supervisor_and_a_trainer_that_are_killed_together_leave_nothing(tmp_path):
    with world.running(tmp_path, "run.max_steps=1000", "rollout.tp=2", launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 1, "first step")
        family, supervisor = world.family(trainer.pid), supervisor_of(trainer.pid)
        port = port_of(supervisor)
        weights = [file for file in world.shared_memory(family) if "/dev/shm/megagrpo-" in str(file)]
        files = [
            file
            for file in world.shared_memory(family)
            if not file.name.startswith("megagrpo-") and file.parent.name == "shm"
        ]
        titles = [Path(f"/proc/{pid}/cmdline").read_text() for pid in below(supervisor)]
        for role in ("EngineCore", "Worker"):  # as `ps | grep megagrpo` shows them
            assert any(f"megagrpo-vllm::{role}" in title for title in titles), titles
        named = {"psm_megagrpo-", "vllm_dist_megagrpo-"} if WORKERS_SHARE_MEMORY else {"psm_megagrpo-"}
        assert weights and {re.sub(r"[0-9].*", "", file.name) for file in files} == named, files
        assert not is_free(port)
        for pid in (trainer.pid, supervisor):
            os.kill(pid, signal.SIGKILL)
        trainer.wait()
        world.wait_for(lambda: not any(map(world.alive, family)), "end of all processes", seconds=5)
        assert is_free(port)
        world.wait_for(
            lambda: not any(file.exists() for file in files + weights), "end of all files in shared memory", seconds=5
        )


taken = []  # sockets that listen at the server's port


def kill_supervisor_and_take_its_port(trainer_pid):
    """The supervisor's server ends with it, and another program takes its port before the restart."""
    supervisor = supervisor_of(trainer_pid)
    port = port_of(supervisor)
    os.kill(supervisor, signal.SIGKILL)
    world.wait_for(lambda: is_free(port), "free port", seconds=5)
    taken.append(socket.socket())
    taken[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken[-1].bind(("127.0.0.1", port))
    taken[-1].listen()


@pytest.mark.full
def test_a_supervisor_that_is_killed_in_a_sync_costs_a_restart_at_a_fresh_port(tmp_path):
    options = ["run.max_steps=5"]
    plain = world.train(tmp_path / "plain", *options)

    def prepare():
        pid = os.getpid()
        in_the_third_update(lambda: kill_supervisor_and_take_its_port(pid))

    with world.running(tmp_path / "killed", *options, prepare=prepare, launched=True) as trainer:
        run = trainer.wait(seconds=280)  # less than rollout.weight_sync_timeout
    assert run.code == 0, run.err
    assert "and another process took its port" in run.out and "is back, with weight version" in run.out
    assert_same_steps(run, plain)


@pytest.mark.full
def test_two_ranks_follow_a_server_to_its_fresh_port(tmp_path):
    options = ["run.max_steps=8"]
    plain = world.finish(world.start(tmp_path / "plain", *options, NPROC="2"), tmp_path / "plain")
    process = world.start(tmp_path / "killed", *options, launched=True, NPROC="2")
    world.wait_for(lambda: world.steps_done(tmp_path / "killed") >= 2, "second step")
    kill_supervisor_and_take_its_port(process.pid)
    run = world.finish(process, tmp_path / "killed", seconds=240)
    assert run.code == 0, run.err
    assert "and another process took its port" in run.out
    assert_same_steps(run, plain)
