"""A run on servers that somebody else keeps: one dies, the others do its work, and it is given the current weights when it is back."""

import os
import signal

import pytest

from megagrpo.rollout.launcher import Launcher, ServerOptions
from tests.e2e import world
from tests.e2e.tiny_servers import below

TOKEN = "a-token-of-the-tests-1234"


@pytest.mark.full
def test_a_server_of_somebody_else_that_dies_is_left_out_and_filled_when_it_is_back(tmp_path):
    options = ServerOptions(str(world.folder() / "model"), "float32", 64, max_num_seqs=64, kv_cache_gb=1, omp_threads=1)
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN)
    with Launcher(options, tmp_path / "servers", num_servers=2, token=TOKEN) as launcher:
        launcher.start()
        urls = launcher.wait()
        words = [f"rollout.urls=[{','.join(urls)}]", f"rollout.token_file={file}", "run.max_steps=5000"]
        with world.running(tmp_path, *words, launched=True) as trainer:
            world.wait_for(lambda: world.steps_done(tmp_path) >= 2, "second step")
            for pid in below(launcher.servers[0].supervisor.pid):
                os.kill(pid, signal.SIGKILL)
            world.wait_for(lambda: not launcher.servers[0].alive, "end of the server")
            before = world.steps_done(tmp_path)
            world.wait_for(lambda: world.steps_done(tmp_path) >= before + 3, "steps without it")
            launcher.start_again(0)
            world.wait_for(lambda: f"vLLM server {urls[0]} is back, with weight version" in trainer.out(), "its return")
            before = world.steps_done(tmp_path)
            world.wait_for(lambda: world.steps_done(tmp_path) >= before + 3, "steps with it")
            os.kill(trainer.pid, signal.SIGTERM)
            run = trainer.wait()
    assert run.code == 128 + signal.SIGTERM, run.err
    assert f"vLLM server {urls[0]} is left out until it answers as it should" in run.out
    versions = [line["weight_version"] for line in run.metrics]
    assert versions == list(range(versions[0], versions[0] + len(versions)))
