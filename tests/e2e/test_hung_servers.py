"""`megagrpo serve`, and a run with servers of its own, when a vLLM server hangs but passes its health check. A busy
server is not treated as hung."""

import os
import signal
import threading
import time

import pytest

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.connections import healthy
from megagrpo.engine.servers import remote as serve
from megagrpo.engine.servers import restarts
from megagrpo.types import SamplingParams
from tests.e2e import world
from tests.e2e.test_server_dies import assert_same_steps, processes_of_server
from tests.e2e.tiny_servers import PROMPTS, below, connect, greedy, launch, model_folder
from tests.e2e.world import wait_for

ENGINE_SECONDS = 6.0


def look_often(set_to=setattr):
    set_to(restarts, "CHECK_SECONDS", 0.2)
    set_to(restarts, "HANG_SECONDS", ENGINE_SECONDS)


@pytest.mark.full
def test_a_server_whose_engine_is_stopped_is_started_again_and_one_that_works_is_left_alone(
    tmp_path, monkeypatch, capsys
):
    look_often(monkeypatch.setattr)
    folder = model_folder("llama", 0)
    launcher = launch(folder, "llama_that_hangs")
    launcher.max_restarts = 1
    kept, end = connect(launcher, folder), threading.Event()
    before = greedy(kept.engine)
    watching = threading.Thread(target=lambda: serve._watch(launcher, end, ENGINE_SECONDS))
    watching.start()
    try:
        begun = time.monotonic()
        while time.monotonic() - begun < 2 * ENGINE_SECONDS:
            kept.engine.generate(PROMPTS * 12, 4, SamplingParams(1.0, 100), seed=0)
        assert not launcher.restarts
        _, *behind = below(launcher.servers[0].supervisor.pid)
        for pid in behind:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1)
        assert healthy(launcher.urls[0]), "its health check tells it already"
        wait_for(lambda: launcher.restarts, "restart")
        wait_for(lambda: healthy(launcher.urls[0]), "answer of the new one")
        assert greedy(kept.engine) == before
    finally:
        end.set()
        watching.join()
        launcher.stop()
    ending, again = capsys.readouterr().err.splitlines()[-2:]
    assert "is up, but its engine has not responded for 6 s (rollout.weight_sync_timeout); killing it" in ending
    assert "restarting it, 1 of 1 times" in again


def stop_the_engine_at_the_tenth_prompt():
    """Called in the trainer: stops its server's compute process from then on."""
    look_often()
    ask, pid, asked = VllmEngine._ask, os.getpid(), []

    async def disturbed(self, *request, **options):
        asked.append(request)
        if len(asked) == 40:  # a request for each of 4 responses
            for behind in processes_of_server(pid)[1:]:
                os.kill(behind, signal.SIGSTOP)
        return await ask(self, *request, **options)

    VllmEngine._ask = disturbed


@pytest.mark.full
def test_a_run_whose_engine_hangs_in_generation_ends_its_server_and_takes_the_same_steps(tmp_path):
    options = ["run.max_steps=4", f"rollout.weight_sync_timeout={ENGINE_SECONDS:g}"]
    plain = world.train(tmp_path / "plain", *options, prepare=look_often, launched=True)
    assert plain.code == 0 and "killing it" not in plain.out, plain.err
    run = world.train(tmp_path / "hung", *options, prepare=stop_the_engine_at_the_tenth_prompt, launched=True)
    assert run.code == 0, run.err
    assert "is up, but its engine has not responded for 6 s (rollout.weight_sync_timeout); killing it" in run.out
    assert "restarting it, 1 of 3 times" in run.out and "is back, with weight version 3" in run.out
    assert_same_steps(run, plain)
