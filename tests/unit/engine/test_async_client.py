"""The client during weight changes: scripted responses instead of a server, and the requests that the client sends."""

import contextlib
import http.server
import json
import threading
import time
from types import SimpleNamespace

import pytest

from megagrpo.engine import client
from megagrpo.engine import load_balancing as distribution
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.fleet import State
from megagrpo.engine.http.protocol import EngineError, derive_seed
from megagrpo.types import Prompt, SamplingParams
from tests.unit.engine.stand_ins import noting

PROMPT = Prompt(3, (1, 2), "", position=8)
SAMPLING = SamplingParams(1.0, 6)


def choice(ids, reason, *versions, index=0):
    """A choice as vLLM sends it; `versions` are (version, start, end)."""
    spans = [{"version": v, "start": start, "end": end} for v, start, end in versions]
    logprobs = {"content": [{"token_id": i, "logprob": -0.5} for i in ids]}
    return {"index": index, "token_ids": ids, "finish_reason": reason, "logprobs": logprobs, "weight_versions": spans}


@contextlib.contextmanager
def scripted(*answers, paused=(), reply=None):
    """(address, received bodies) of a server that gives these responses in turn: lists of choices, a function that
    returns one, or a status; or `reply` of each body. `paused` holds its responses to /is_paused, then False."""
    answers, paused, bodies = list(answers), list(paused), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append(body)
            answer = []
            if "sampling_params" in body:
                answer = reply(body) if reply else answers.pop(0)
            answer = answer() if callable(answer) else answer
            self.reply(answer if isinstance(answer, int) else 200, {"choices": answer})

        def do_GET(self):
            self.reply(200, {"is_paused": bool(paused) and paused.pop(0)})

        def reply(self, status, value):
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()


def ask(url, n=1, in_flight="resume", version=7):
    engine = VllmEngine([url], str, in_flight=in_flight)
    engine.weight_version = version
    return engine.generate([PROMPT], n, SAMPLING, seed=0)[0]


def test_a_response_that_was_broken_off_goes_on_from_its_tokens():
    parts = {
        2: [choice([5, 6], "abort", ("5", 0, 2))],
        4: [choice([7], "abort", ("6", 0, 1))],
        5: [choice([8, 9], "stop", ("7", 0, 2))],
    }
    first = derive_seed(0, PROMPT.prompt_id, 0)

    def reply(body):
        if body["sampling_params"]["seed"] == first + 1:
            return [choice([9], "stop", ("5", 0, 1))]
        return parts[len(body["token_ids"])]

    with scripted(reply=reply) as (url, bodies):
        broken, whole = ask(url, n=2)
    assert broken.response_ids.tolist() == [5, 6, 7, 8, 9] and whole.response_ids.tolist() == [9]
    assert broken.finish_reason == "stop" and broken.rollout_logprobs.tolist() == [-0.5] * 5
    assert broken.token_versions.tolist() == [5, 5, 6, 7, 7] and whole.later_versions == ()
    params = {tuple(body["token_ids"]): body["sampling_params"] for body in bodies if body["token_ids"] != [1, 2]}
    assert [(ids, p["n"], p["max_tokens"]) for ids, p in params.items()] == [
        ((1, 2, 5, 6), 1, 4),
        ((1, 2, 5, 6, 7), 1, 3),
    ]
    # the seeds that continuations of a response in a group had as long as a group was one request
    assert [p["seed"] for p in params.values()] == [derive_seed(first, 0, 2), derive_seed(first, 0, 3)]


@pytest.mark.parametrize(("room", "first"), [(2, "answered"), (3, "begun")], ids=["full", "not full"])
def test_what_comes_next_may_begin_when_servers_have_room_for_more(room, first):
    order = []

    def late():
        time.sleep(0.2)
        order.append("answered")
        return [choice([4], "stop", ("7", 0, 1))]

    with scripted(late, late) as (url, _):
        engine = VllmEngine([url], str, in_flight="keep", max_num_seqs=room)
        engine.weight_version = 7
        list(engine.groups([PROMPT, PROMPT], 1, SAMPLING, seed=0, on_begun=lambda: order.append("begun")))
    assert order[0] == first and order.count("answered") == 2 and "begun" in order


def test_generation_ends_with_its_last_answer_also_where_servers_may_come_back(monkeypatch):
    monkeypatch.setattr(distribution, "LOOK_SECONDS", 20.0)
    with scripted([choice([4], "stop", ("7", 0, 1))]) as (url, _):
        engine = VllmEngine([url], str, patience=30.0)
        engine.weight_version = 7
        began = time.monotonic()
        engine.generate([PROMPT], 1, SAMPLING, seed=0)
        assert time.monotonic() - began < 10


def test_a_response_that_was_broken_off_before_its_first_token_is_asked_for_again():
    with scripted([choice([], "abort")], [choice([4], "stop", ("7", 0, 1))]) as (url, bodies):
        (rollout,) = ask(url)
    assert rollout.response_ids.tolist() == [4] and rollout.token_versions.tolist() == [7]
    assert [body["token_ids"] for body in bodies] == [[1, 2], [1, 2]]


def test_nothing_is_broken_off_where_responses_are_kept():
    with (
        scripted([choice([5], "abort", ("7", 0, 1))]) as (url, _),
        pytest.raises(EngineError, match="with finish_reason 'abort'"),
    ):
        ask(url, in_flight="keep")


def test_a_server_that_refuses_during_an_update_is_asked_again_after_it(monkeypatch):
    monkeypatch.setattr(client, "LOOK_SECONDS", 0.01)
    with scripted(503, [choice([4], "stop", ("7", 0, 1))], paused=[True, True]) as (url, bodies):
        assert ask(url)[0].response_ids.tolist() == [4] and len(bodies) == 2


def test_a_server_that_refuses_for_another_reason_fails_after_some_attempts(monkeypatch):
    monkeypatch.setattr(client, "LOOK_SECONDS", 0.01)
    with (
        scripted(503, 503, 503) as (url, bodies),
        pytest.raises(EngineError, match="failed, after 3 attempts, on prompt 3"),
    ):
        ask(url)
    assert len(bodies) == 3


@pytest.mark.parametrize(("in_flight", "syncs"), [("resume", 1), ("wait", 2)])
def test_a_response_leaves_an_adapter_that_is_too_old_and_its_tokens_have_the_versions_of_their_adapters(
    in_flight, syncs
):
    def reply(body):
        if body["model"] != "policy-7":
            return [choice([8], "stop", ("default", 0, 1))]
        for _ in range(syncs):
            assert not [body for body in bodies if "request_ids" in body]
            engine.weight_version += 1
            engine.leave_old_adapters()
        return [choice([5, 6], "abort", ("default", 0, 2))]

    with scripted(reply=reply) as (url, bodies):
        engine = VllmEngine([url], str, in_flight=in_flight, adapters=2)
        engine.weight_version = 7
        (rollout,) = engine.generate([PROMPT], 1, SAMPLING, seed=0)[0]
    assert rollout.response_ids.tolist() == [5, 6, 8] and rollout.token_versions.tolist() == [7, 7, 7 + syncs]
    first, aborted, second = bodies
    assert aborted == {"request_ids": [f"generate-tokens-{first['request_id']}"]}
    assert second["model"] == f"policy-{7 + syncs}" and second["token_ids"] == [1, 2, 5, 6]


def test_a_server_without_the_adapter_is_asked_again_for_the_current_one():
    def without():
        engine.weight_version = 8
        return 404

    with scripted(without, [choice([4], "stop", ("default", 0, 1))]) as (url, bodies):
        engine = VllmEngine([url], str, in_flight="wait", adapters=2)
        engine.weight_version = 7
        (rollout,) = engine.generate([PROMPT], 1, SAMPLING, seed=0)[0]
    assert [body["model"] for body in bodies] == ["policy-7", "policy-8"] and rollout.weight_version == 8


def test_what_was_cut_ends_like_what_reaches_its_greatest_length():
    first = derive_seed(0, PROMPT.prompt_id, 0)
    both_sent = threading.Barrier(2)

    def reply(body):
        params = body["sampling_params"]
        if params["max_tokens"] == 1:
            return [choice([3], "length", ("7", 0, 1))]
        if both_sent.wait(10) == 0:
            engine.cut([PROMPT.position])
        both_sent.wait(10)
        return [choice([5, 6], "abort", ("7", 0, 2)) if params["seed"] == first else choice([], "abort")]

    with scripted(reply=reply) as (url, bodies):
        engine = VllmEngine([url], str, in_flight="keep")
        engine.weight_version = 7
        some, none = engine.generate([PROMPT], 2, SAMPLING, seed=0)[0]
    assert [(r.response_ids.tolist(), r.finish_reason) for r in (some, none)] == [([5, 6], "length"), ([3], "length")]
    asked = [body for body in bodies if "sampling_params" in body]
    assert [body["sampling_params"]["max_tokens"] for body in asked] == [6, 6, 1]
    (aborted,) = [body["request_ids"] for body in bodies if "request_ids" in body]
    assert sorted(aborted) == sorted(f"generate-tokens-{body['request_id']}" for body in asked[:2])


@pytest.mark.parametrize("versions", [[("default", 0, 1)], [("9", 0, 1)], [("6", 0, 1), ("0", 1, 2)]])
def test_weights_that_never_were_are_refused(versions):
    with (
        scripted([choice([4, 5], "stop", *versions)]) as (url, _),
        pytest.raises(EngineError, match="the last sync was 7"),
    ):
        ask(url)


def test_the_next_version_may_be_known_to_the_server_first_and_none_said_is_that_of_the_asking():
    with scripted([choice([4, 5], "stop", ("7", 0, 1), ("8", 1, 2))], [choice([4], "stop")]) as (url, _):
        assert ask(url)[0].token_versions.tolist() == [7, 8] and ask(url)[0].token_versions.tolist() == [7]


@pytest.mark.parametrize(("in_flight", "query"), [("keep", "?reset_running_requests=true"), ("wait", "")])
def test_a_sync_empties_the_prefix_cache_before_a_server_serves_again(in_flight, query):
    """vLLM keeps its cache in a `keep` pause: a prefix computed with older weights could be reused under the new
    weights."""
    with noting() as (url, paths):
        engine = VllmEngine([url], str, in_flight=in_flight)
        engine.fleet.loaded(url, 8)
        engine.resume(SimpleNamespace(index=SimpleNamespace(version=8), servers=None))
    assert paths == ["/update_weight_version", f"/reset_prefix_cache{query}", "/resume"] and engine.weight_version == 8


def test_a_server_that_did_not_load_the_weights_is_not_resumed_with_their_version():
    """A server can become available again between the load and the end of a sync."""
    with noting() as (loaded, paths), noting() as (missed, other_paths):
        engine = VllmEngine([loaded, missed], str)
        engine.fleet.loaded(loaded, 8)
        engine.resume(SimpleNamespace(index=SimpleNamespace(version=8), servers=None))
    assert paths[-1] == "/resume" and other_paths == []
    assert engine.fleet.states() == {loaded: State.SERVING, missed: State.SILENT}
