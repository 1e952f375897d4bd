"""Runs on servers that the user manages. Servers die and return at their address, join and leave, or all disappear; the
run takes the same steps as without faults."""

import os
import signal
import time

import pytest

from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import ServerOptions
from tests.e2e import world
from tests.e2e.faulty_proxy import FaultyProxy
from tests.e2e.test_async_runs import AHEAD, STILL
from tests.e2e.test_restarts import requests_served
from tests.e2e.test_server_dies import in_the_third_update
from tests.e2e.tiny_servers import below

TOKEN = "a-token-of-the-tests-1234"
MANY = "run.max_steps=5000"


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """Two servers that require a token."""
    options = ServerOptions(str(world.folder() / "model"), "float32", 64, max_num_seqs=64, kv_cache_gb=1, omp_threads=1)
    with Launcher(
        options, tmp_path_factory.mktemp("servers"), num_servers=2, token=TOKEN, max_restarts=100
    ) as launcher:
        launcher.start()
        launcher.wait()
        yield launcher


@pytest.fixture
def words(launcher, tmp_path):
    """Options of a run on these servers, whose state does not depend on earlier tests."""
    restart(launcher, *(place for place, server in enumerate(launcher.servers) if not server.alive))
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN)
    return [f"rollout.urls=[{','.join(launcher.urls)}]", f"rollout.token_file={file}"]


def kill(launcher, place):
    server = launcher.servers[place]
    for pid in below(server.supervisor.pid):
        os.kill(pid, signal.SIGKILL)
    world.wait_for(lambda: not server.alive, "end of the server")


def restart(launcher, *places):
    for place in places:
        launcher.restart(place)
    launcher.wait()


def more_steps(output, count=3):
    before = world.steps_done(output)
    world.wait_for(lambda: world.steps_done(output) >= before + count, f"{count} steps more")


def asked(run):
    """Every rollout of a run, in order."""
    return [(row["step"], row["prompt_id"], row["completion"], row["reward"]) for row in run.completions]


def assert_undisturbed(run, output, words, bits=True):
    """Assert that the run has taken the same steps as without faults, and compare `bits` where the loss does not use
    vLLM's log-probs: these depend on the batch that vLLM decodes."""
    plain = world.train(output, *words, f"run.max_steps={len(run.metrics)}", launched=True)
    assert plain.code == 0 and asked(run) == asked(plain), plain.err
    if not bits:
        return
    assert [line["loss"] for line in run.metrics] == [line["loss"] for line in plain.metrics]
    expected, found = world.plain_tensors(plain.newest), world.plain_tensors(run.newest)
    assert (
        len(expected) > 30
        and expected.keys() == found.keys()
        and all(expected[name].equal(tensor) for name, tensor in found.items())
    )


def stopped(trainer):
    """Send the run a signal to save and stop; return the ended run."""
    os.kill(trainer.pid, signal.SIGTERM)
    run = trainer.wait()
    assert run.code == 128 + signal.SIGTERM, run.err
    return run


@pytest.mark.full
def test_a_server_that_dies_is_left_out_and_back_with_the_current_weights(launcher, words, tmp_path):
    url = launcher.urls[0]
    with world.running(tmp_path, *words, MANY, launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 2, "second step")
        kill(launcher, 0)
        more_steps(tmp_path)
        restart(launcher, 0)
        world.wait_for(lambda: f"vLLM server {url} is back, with weight version" in trainer.out(), "its return")
        before = requests_served(url, TOKEN)
        more_steps(tmp_path)
        assert requests_served(url, TOKEN) > before
        run = stopped(trainer)
    assert f"vLLM server {url} excluded until it responds correctly" in run.out
    assert_undisturbed(run, tmp_path / "plain", words)


@pytest.mark.full
def test_servers_join_and_leave_while_a_run_trains(launcher, words, tmp_path):
    (first, second), file = launcher.urls, tmp_path / "urls"
    alone = [f"rollout.urls=[{first}]", words[1], f"rollout.urls_file={file}"]
    with world.running(tmp_path, *alone, MANY, launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 2, "second step")
        before = requests_served(second, TOKEN)
        file.write_text(f"{first}\n{second}\n")
        world.wait_for(lambda: requests_served(second, TOKEN) > before, "requests to the one that joined")
        more_steps(tmp_path)
        file.write_text(second)
        more_steps(tmp_path, 2)
        before = requests_served(first, TOKEN)
        more_steps(tmp_path)
        assert requests_served(first, TOKEN) == before
        run = stopped(trainer)
    assert f"vLLM server {second} has joined, with weight version" in run.out and "warning" not in run.out
    nobody = ["rollout.urls=[http://127.0.0.1:1]", *alone[1:]]  # the file wins
    run = world.train(tmp_path, *nobody, f"run.max_steps={len(run.metrics) + 2}", "--resume", launched=True)
    assert run.code == 0, run.err
    assert_undisturbed(run, tmp_path / "plain", words)


@pytest.mark.full
@pytest.mark.parametrize("ahead", [(), (*AHEAD, *STILL)], ids=["in step", "ahead"])
def test_when_all_servers_are_gone_the_run_saves_what_it_has_and_goes_on_when_they_are_back(
    ahead, launcher, words, tmp_path
):
    words += ahead
    with world.running(tmp_path, *words, MANY, "rollout.reconnect_timeout=3", launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 2, "second step")
        for place in (0, 1):
            kill(launcher, place)
        began = time.monotonic()
        run = trainer.wait()
    assert run.code == 1 and 2 < time.monotonic() - began < 20, run.err
    named = ", ".join(f"vLLM server {url}" for url in launcher.urls)
    assert f"rank 0 stops: no vLLM server responds any longer: {named}" in run.err and "Traceback" not in run.err
    steps = len(run.metrics)
    assert run.saved == [f"step_{steps:06d}"]
    restart(launcher, 0, 1)
    run = world.train(tmp_path, *words, f"run.max_steps={steps + 2}", "--resume", launched=True)
    assert run.code == 0 and len(run.metrics) == steps + 2, run.err
    assert_undisturbed(run, tmp_path / "plain", words, bits=not ahead)


def send(number, pids):
    for pid in pids:
        os.kill(pid, number)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared_memory", "p2p"])
def test_a_server_that_hangs_in_a_sync_is_left_out_and_back_when_it_goes_on(transport, launcher, words, tmp_path):
    url, pids = launcher.urls[0], below(launcher.servers[0].supervisor.pid)
    words += ["rollout.weight_sync_timeout=3", f"rollout.weight_sync_transport={transport}"]
    prepare = lambda: in_the_third_update(lambda: send(signal.SIGSTOP, pids), url)  # noqa: E731
    try:
        with world.running(tmp_path, *words, MANY, launched=True, prepare=prepare) as trainer:
            world.wait_for(lambda: f"vLLM server {url} is left out" in trainer.out(), "end of the wait for it")
            more_steps(tmp_path)
            send(signal.SIGCONT, pids)
            world.wait_for(lambda: f"vLLM server {url} is back" in trainer.out(), "its return")
            before = requests_served(url, TOKEN)
            more_steps(tmp_path)
            assert requests_served(url, TOKEN) > before
            run = stopped(trainer)
    finally:
        send(signal.SIGCONT, pids)
    assert_undisturbed(run, tmp_path / "plain", words)


SPOILED = [("/pause", "reset"), ("/update_weights", "lost"), ("/finish_weight_update", "html"), ("/resume", "gateway")]


@pytest.mark.full
def test_a_sync_whose_requests_are_broken_off_or_answered_by_something_else_costs_no_run(launcher, words, tmp_path):
    with FaultyProxy(int(launcher.urls[0].rpartition(":")[2])) as proxy:
        through = [f"rollout.urls=[{proxy.url},{launcher.urls[1]}]", words[1]]
        with world.running(tmp_path, *through, MANY, launched=True) as trainer:
            world.wait_for(lambda: world.steps_done(tmp_path) >= 2, "second step")
            for times, (path, fault) in enumerate(SPOILED, 1):
                proxy.faults[path] = fault
                back = f"vLLM server {proxy.url} is back, with weight version"
                world.wait_for(
                    lambda back=back, times=times: trainer.out().count(back) == times, f"return after {fault} of {path}"
                )
            run = stopped(trainer)
    assert not proxy.faults
    assert_undisturbed(run, tmp_path / "plain", words)
