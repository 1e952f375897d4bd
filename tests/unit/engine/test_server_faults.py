"""Servers with every kind of network fault: each prompt gets one response from the remaining servers, or the error
names the cause."""

import threading
import time
from contextlib import ExitStack, closing

import pytest

import megagrpo.engine.client as client_module
import megagrpo.engine.http.connections as http_module
import megagrpo.engine.http.fleet as fleet_module
import megagrpo.engine.load_balancing as generation_module
import megagrpo.engine.servers.restarts as restarts_module
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import EngineDeadError, EngineError, derive_seed
from megagrpo.engine.http.server_calls import named_urls, read_urls
from megagrpo.engine.servers.restarts import Reconnector
from megagrpo.types import Prompt, SamplingParams, WeightSyncError
from tests.unit.engine.stand_ins import Process, StandIn, ids_for

N = 2
SAMPLING = SamplingParams(1.0, 4)
ANSWERS_WRONG = ["html", "truncated", "fewer", "one twice", "too long", "no log-prob", "words", "wrong version"]
BREAKS_OFF = ["reset", "half", "no http", "error", "drip"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(client_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(generation_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(generation_module, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(generation_module, "REASSIGN_SECONDS", 0.5)
    monkeypatch.setattr(restarts_module, "RESTART_LOOP_SECONDS", 0.02)
    monkeypatch.setattr(fleet_module, "FIRST_EXCLUSION_SECONDS", 0.3)
    monkeypatch.setattr(http_module, "HEALTH_SECONDS", 1.0)


@pytest.fixture
def servers():
    """A factory of stand-ins that are closed at the end."""
    with ExitStack() as stack:
        yield lambda *words, **options: stack.enter_context(closing(StandIn(*words, **options)))


def prompts(count):
    """Prompts with different tokens."""
    return [Prompt(i, (1, 2, i + 3), "") for i in range(count)]


def generate(engine, count=12, seen=None):
    """All groups; asserts that each belongs to its prompt and arrives once."""
    finished = sorted(engine.groups(prompts(count), N, SAMPLING, 5))
    assert [index for index, _ in finished] == list(range(count)), "a prompt was lost or came twice"
    groups = [group for _, group in finished]
    for prompt, group in zip(prompts(count), groups, strict=True):
        body = {"sampling_params": {"seed": derive_seed(5, prompt.prompt_id, prompt.occurrence)}}
        assert [list(rollout.response_ids) for rollout in group] == [ids_for(body, index) for index in range(N)]
    return groups


def engine_of(*servers, patience=5.0, **options):
    return VllmEngine(
        [server.url for server in servers], str, max_num_seqs=8, patience=patience, **{"request_timeout": 1.0} | options
    )


@pytest.mark.parametrize("mode", BREAKS_OFF)
def test_a_server_that_breaks_off_costs_no_prompt(mode, servers):
    bad, good = servers(mode), servers(delay=0.02)
    generate(engine_of(good, bad, request_timeout=5.0 if mode == "drip" else 30.0))  # only a drip has to be given up
    assert bad.asked


@pytest.mark.parametrize("mode", ANSWERS_WRONG)
def test_a_server_that_answers_wrong_is_excluded_and_costs_no_prompt(mode, servers, monkeypatch):
    # excluded until the test ends, however busy the machine is
    monkeypatch.setattr(fleet_module, "FIRST_EXCLUSION_SECONDS", 60.0)
    bad, good = servers(mode), servers(delay=0.02)
    engine = engine_of(good, bad, request_timeout=30.0)
    generate(engine)
    assert bad.asked and engine.fleet.serving() == [good.url]


def test_a_slow_connection_is_waited_for(servers):
    slow = servers("slow")
    engine = engine_of(slow, servers(delay=0.02))
    generate(engine)
    assert slow.asked and engine.fleet.serving() == engine.urls


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("html", "not a response to a prompt .*<html>"), ("error", "out of order"), ("fewer", "got 0 responses")],
)
def test_when_every_response_is_invalid_the_error_quotes_the_last_one(mode, reason, servers):
    with pytest.raises(EngineError, match=f"failed, after 3 attempts, on prompt 0: .*{reason}"):
        generate(engine_of(servers(mode), patience=0.0), count=1)


def test_a_server_that_refuses_connections_is_left_out_and_asked_again_when_it_is_back(servers):
    gone, good = servers(), servers(delay=0.05)
    gone.close()
    engine = engine_of(good, gone)
    generate(engine, 4)
    assert engine.fleet.serving() == [good.url]
    with closing(StandIn(port=gone.port)) as back:
        generate(engine, 16)
        assert engine.fleet.serving() == engine.urls and back.asked


def test_prompts_of_a_server_that_is_stopped_go_to_the_others_and_it_comes_back_when_it_goes_on(servers):
    good, halted = servers(delay=0.05), Process(delay=0.2)
    try:
        engine = engine_of(good, halted, request_timeout=60.0)
        threading.Timer(0.1, halted.stop).start()
        began = time.monotonic()
        generate(engine, 24)
        assert engine.fleet.serving() == [good.url] and time.monotonic() - began < 20
        halted.go_on()
        generate(engine, 24)
        assert engine.fleet.serving() == engine.urls
    finally:
        halted.kill()


@pytest.mark.full
def test_a_server_that_is_killed_while_it_generates_costs_no_prompt(servers):
    good, killed = servers(delay=0.05), Process(delay=0.3)
    threading.Timer(0.1, killed.kill).start()
    engine = engine_of(good, killed)
    generate(engine, 24)
    assert engine.fleet.serving() == [good.url]


def test_when_all_are_gone_the_run_waits_as_long_as_it_was_told_and_names_them():
    both = Process(delay=0.3), Process(delay=0.3)
    engine = engine_of(*both, patience=1.0)
    for process in both:
        threading.Timer(0.1, process.kill).start()
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=f"no vLLM server responds any longer: .*{both[0].url}, .*{both[1].url}"):
        generate(engine)
    assert 1.0 <= time.monotonic() - began < 10


def test_servers_of_others_are_given_the_current_weights_before_they_are_asked_again(servers):
    good, back = servers(version="3", delay=0.02), servers(version="7")
    engine, filled, said = engine_of(good, back), [], []
    engine.weight_version = 3

    def refill(url):
        filled.append(url)
        if len(filled) == 1:
            raise RuntimeError("no room for weights")
        back.version = "3"
        return 3

    with Reconnector(engine, refill, said.append):
        generate(engine, 12)
        deadline = time.monotonic() + 5
        while engine.fleet.serving() != engine.urls and time.monotonic() < deadline:
            time.sleep(0.01)
    assert filled == [back.url] * 2 and engine.fleet.serving() == engine.urls
    assert said[0].endswith("excluded until it responds correctly") and "did not load the current weights" in said[1]
    assert said[2].endswith("is back, with weight version 3")


def test_a_server_that_missed_a_sync_while_it_was_filled_is_filled_again(servers):
    back, said, versions = servers(), [], []
    engine = engine_of(servers(), back)
    engine.fleet.silent(back.url)

    def refill(url):
        versions.append(engine.weight_version)
        if len(versions) == 1:
            engine.weight_version = 1  # a sync of the other servers ends before the report of this refill
        return versions[-1]

    with Reconnector(engine, refill, said.append):
        deadline = time.monotonic() + 5
        while engine.fleet.serving() != engine.urls and time.monotonic() < deadline:
            time.sleep(0.01)
    assert versions == [0, 1] and said[-1] == f"vLLM server {back.url} is back, with weight version 1"
    assert not [line for line in said if line.endswith("version 0")]


@pytest.mark.parametrize("way", ["reset", "half", "no http", "html", "gateway"])
def test_a_server_that_cannot_be_told_anything_is_left_out_of_that(way, servers):
    good, bad = servers(), servers()
    bad.spoiled["/get_world_size"] = way
    engine = engine_of(good, bad)
    assert engine.workers() == {good.url: 1} and engine.fleet.serving() == [good.url]
    with pytest.raises(WeightSyncError, match=f"phase publish: vLLM server {bad.url} "):
        engine_of(bad, patience=0.0).workers()  # no server would come back


def test_what_a_server_says_of_itself_in_a_sync_is_an_error(servers):
    good, bad = servers(), servers()
    bad.spoiled["/get_world_size"] = "error"
    with pytest.raises(WeightSyncError, match=f"vLLM server {bad.url} answered 500 to /get_world_size: out of order"):
        engine_of(good, bad).workers()


def test_servers_that_join_and_leave_are_told_of_once(servers, tmp_path):
    first, second, said, file = servers(), servers(version="7"), [], tmp_path / "urls"
    engine = engine_of(first, urls_file=file)
    engine.weight_version = 3

    def wait_for(lines):
        deadline = time.monotonic() + 5
        while len(said) < lines and time.monotonic() < deadline:
            time.sleep(0.01)

    with Reconnector(engine, lambda url: 3, said.append):
        for turn, urls in enumerate(([first.url, second.url], [second.url]), 1):
            file.write_text("\n".join(urls))
            engine.follow()
            wait_for(turn + 1)
    assert said == [
        f"vLLM server {second.url} will join when healthy and synced (rollout.urls_file)",
        f"vLLM server {second.url} has joined, with weight version 3",
        f"vLLM server {first.url} removed (rollout.urls_file)",
    ]


def test_servers_join_and_leave_by_a_file_between_steps(servers, tmp_path):
    first, second = servers(delay=0.03), servers(version="7")
    file = tmp_path / "urls"
    engine = VllmEngine([first.url], str, max_num_seqs=8, patience=5.0, urls_file=file)
    generate(engine)
    file.write_text(f"# two\n{first.url}/\n{second.url}\n{second.url}\n")
    generate(engine)
    # it has other weights
    assert engine.urls == [first.url, second.url] and engine.fleet.serving() == [first.url] and not second.asked
    second.version = "default"
    while not (second.asked and engine.fleet.serving() == engine.urls):  # a slow health check delays a server
        generate(engine, 32)
    asked = len(first.asked)
    file.write_text(second.url)
    generate(engine)
    assert engine.workers() == {second.url: 1} and len(first.asked) == asked
    for nothing in ("", "not an address\n"):
        file.write_text(nothing)
        generate(engine, 2)
        assert engine.urls == [second.url] and read_urls(file) == []
    assert named_urls([first.url], str(file)) == named_urls([first.url], None) == [first.url]
    file.write_text(second.url)
    assert named_urls([first.url], str(file)) == [second.url]
