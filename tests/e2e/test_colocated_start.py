"""Servers that share the trainer's GPUs start before the trainer allocates memory: vLLM measures free memory twice and
counts the difference as its own. Afterwards either the server or the trainer uses the GPU memory, never both."""

import pytest

from megagrpo.config import ConfigError
from megagrpo.engine.http.protocol import EngineStartError
from megagrpo.engine.http.server_calls import Servers
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.trainer import engine_side, wiring
from megagrpo.trainer.gpu.state_offload import Offload
from tests.e2e import world
from tests.e2e.test_options import largest_difference, succeeded, texts


def raising(error: Exception):
    def call(*args, **kwargs):
        raise error

    return call


@pytest.mark.parametrize(("shared", "first"), [(True, "the server is waited for"), (False, "the policy is built")])
def test_a_policy_is_built_after_servers_on_its_gpus_have_started_and_beside_others(shared, first, tmp_path):
    def prepare():
        engine_side.servers_sleep = lambda config: shared
        Launcher.start = lambda self: None
        Launcher.wait = raising(EngineStartError("the server is waited for"))
        wiring.load_policy = raising(ConfigError("the policy is built"))

    run = world.train(tmp_path, prepare=prepare, launched=True)
    assert run.code == 2 and first in run.err


def test_a_server_beside_the_policy_that_does_not_start_is_an_error_of_the_config(tmp_path):
    def prepare():
        engine_side.servers_sleep = lambda config: False
        Launcher.start = lambda self: None
        Launcher.wait = raising(EngineStartError("the server has ended"))

    run = world.train(tmp_path, prepare=prepare, launched=True)
    assert run.code == 2 and run.err.count("the server has ended") == 1 and "rank 0" not in run.err


VERBS = ("/sleep", "/wake_up", "/update_weights", "/resume")
SYNC = "load_weights_only /wake_up?tags=weights /update_weights offload_all /wake_up?tags=kv_cache /resume".split()
TRAIN = ["/sleep?level=2", "load_all"]
SAVE = ["/sleep?level=1", "load_all"]


@pytest.mark.full
def test_trainer_and_servers_have_the_memory_in_turns(tmp_path):
    """vLLM without a GPU gets the same options, and never sleeps."""
    told = tmp_path / "told"

    def note(name):
        with told.open("a") as file:
            file.write(f"{name}\n")

    def noting(verb, offload):
        note(verb)
        return stock[verb](offload)

    async def post(servers, client, url, path, *args, **options):
        if path.startswith(VERBS):
            note(path)
        return await stock["post"](servers, client, url, path, *args, **options)

    verbs = ("load_all", "load_weights_only", "offload_all")
    stock = {verb: getattr(Offload, verb) for verb in verbs} | {"post": Servers._request}

    def prepare():
        engine_side.servers_sleep = lambda config: True
        Servers._request = post
        for verb in verbs:
            setattr(Offload, verb, lambda offload, verb=verb: noting(verb, offload))

    run = succeeded(
        world.train(tmp_path / "turns", "run.save_steps=1", "train.offload=true", prepare=prepare, launched=True)
    )
    noted = told.read_text().split()
    noted = [name for name, before in zip(noted, [None, *noted], strict=False) if name != before]
    again = ["offload_all", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]
    assert noted == ["/sleep?level=2", *SYNC, *TRAIN, *SYNC, *SAVE, *again, *TRAIN, *SYNC, *SAVE]
    plain = succeeded(world.train(tmp_path / "plain", "run.save_steps=1"))
    assert texts(run) == texts(plain) and largest_difference(run, plain) == 0
