"""What `megagrpo serve` does when a vLLM server hangs behind its own health check, and that work is not taken for hanging."""

import os
import signal
import threading
import time

import pytest

from megagrpo import serve
from megagrpo.rollout import pulse
from megagrpo.rollout.launcher import healthy
from megagrpo.types import SamplingParams
from tests.e2e.tiny_servers import PROMPTS, below, connect, greedy, launch, model_folder
from tests.e2e.world import wait_for

ENGINE_SECONDS = 6.0


@pytest.mark.full
def test_a_server_whose_engine_is_stopped_is_started_again_and_one_that_works_is_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pulse, "PULSE_SECONDS", 0.2)
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
    assert "answers, but its engine has said nothing for 6 s (rollout.weight_sync_timeout); ending it" in ending
    assert "starting it again, 1 of 1 times" in again
