"""Servers that share the trainer's GPUs start before it takes memory there: vLLM measures what is free, twice, and counts the difference as
its own."""

import pytest

import megagrpo.train as wiring
from megagrpo.rollout.engine import EngineStartError
from megagrpo.rollout.launcher import Launcher
from tests.e2e import world


def raising(error: Exception):
    def call(*args, **kwargs):
        raise error

    return call


@pytest.mark.parametrize(("shared", "first"), [(True, "the server is waited for"), (False, "the policy is built")])
def test_a_policy_is_built_after_servers_on_its_gpus_have_started_and_beside_others(shared, first, tmp_path):
    def prepare():
        wiring.servers_sleep = lambda config: shared
        Launcher.start = lambda self: None
        Launcher.wait = raising(EngineStartError("the server is waited for"))
        wiring.MegatronPolicy = raising(ValueError("the policy is built"))

    run = world.train(tmp_path, prepare=prepare, launched=True)
    assert run.code == 2 and first in run.err
