"""Kept connections: reused, repeated when the server closes one, and ended when the server moves or the time is over."""

import asyncio
import contextlib
import http.server
import json
import math
import resource
import socket
import threading
import time
from dataclasses import dataclass, replace

import httpx
import numpy as np
import pytest

from benchmarks.stub_engine import Behavior, StubEngine
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.connections import Answer, ConnectionFailed, Connections, MovedServers
from megagrpo.engine.http.protocol import EngineError, derive_seed
from megagrpo.platform.process import open_files
from megagrpo.platform.process.open_files import raise_open_files
from megagrpo.types import Prompt, SamplingParams

RESET = b"reset"  # instead of bytes
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@contextlib.contextmanager
def server(*script):
    """(address, requests) of a server. `script` has, for each connection in turn, the bytes that it sends for each of
    its requests before it closes the connection; None: it never responds. `requests` has the connection of each."""
    listener, requests = socket.create_server(("127.0.0.1", 0), backlog=64), []

    def serve(number, connection):
        with connection:
            for answer in script[number]:
                received = b""
                while b"\r\n\r\n{}" not in received:
                    if not (data := connection.recv(65536)):
                        return
                    received += data
                requests.append(number)
                if answer is None:
                    time.sleep(60)
                    return
                if answer == RESET:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    return
                connection.sendall(answer)

    def accept():
        with contextlib.suppress(OSError):
            for number in range(len(script)):
                thread = threading.Thread(target=serve, args=(number, listener.accept()[0]), daemon=True)
                thread.start()

    threading.Thread(target=accept, daemon=True).start()
    with listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests


def post(url, count=1, timeout=30.0, **options):
    """The answers to `count` requests, one after the other."""

    async def run():
        async with Connections({}, timeout, **options) as connections:
            return [await connections.post(url, "/generate", b"{}") for _ in range(count)]

    return asyncio.run(run())


def test_a_connection_is_kept_for_the_next_requests():
    with server([OK] * 5) as (url, requests):
        assert post(url, 5) == [Answer(200, b"{}")] * 5 and requests == [0] * 5


def test_a_response_longer_than_its_limit_is_an_error():
    async def bounded(url, most):
        async with Connections({}, 30.0) as connections:
            return await connections.post(url, "/generate", b"{}", most=most)

    with server([OK], [OK]) as (url, _):
        assert asyncio.run(bounded(url, 2)) == Answer(200, b"{}")
        with pytest.raises(ConnectionFailed, match="a response of more than 1 bytes"):
            asyncio.run(bounded(url, 1))


@pytest.mark.parametrize("end", [b"", RESET])
def test_a_request_is_repeated_if_the_server_closes_the_kept_connection_as_it_is_sent(end):
    with server([OK, end], [OK], [OK]) as (url, requests):
        assert post(url, 3) == [Answer(200, b"{}")] * 3
    assert requests == [0, 0, 1, 2], "the repeated request has a connection of its own, which is not kept"


def test_a_request_is_repeated_if_the_server_has_closed_all_kept_connections_before():
    """The server is restarted between two steps, or its keep-alive timeout is short."""

    async def run(url):
        async with Connections({}, 30.0) as connections:
            together = [connections.post(url, "/generate", b"{}") for _ in range(3)]
            await asyncio.gather(*together)
            time.sleep(0.1)  # the event loop does not see that the connections were closed
            return await asyncio.gather(*(connections.post(url, "/generate", b"{}") for _ in range(3)))

    with server(*[[OK]] * 6) as (url, requests):
        assert asyncio.run(run(url)) == [Answer(200, b"{}")] * 3 and len(requests) == 6


@pytest.mark.parametrize("answer", [OK[:-1], b"\x00\x01hello\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-le"])
def test_a_request_is_not_repeated_once_a_response_has_begun(answer):
    """The attempt is counted as failed, so that a server that always does it is left out."""
    with server([answer], *[[answer]] * 3) as (url, requests):
        with pytest.raises(ConnectionFailed):
            post(url)
    assert len(requests) == 1


def test_a_request_is_repeated_only_once():
    with server([b""], [b""], [OK]) as (url, requests):
        with pytest.raises(ConnectionFailed, match="ServerDisconnected"):
            post(url)
    assert requests == [0, 1]


def test_a_server_that_refuses_connections_fails_the_attempt():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionFailed, match="ClientConnectorError"):
            post(f"http://127.0.0.1:{unused.getsockname()[1]}")


def test_the_timeout_is_that_of_the_whole_request():
    with server([None]) as (url, _), pytest.raises(TimeoutError):
        post(url, timeout=0.2)


def test_a_request_to_a_server_that_moves_fails_and_the_next_one_goes_to_its_new_address(tmp_path):
    async def run(url, moved_to):
        file = MovedServers(tmp_path / "moved.json")
        async with Connections({}, 600.0, file) as connections, asyncio.timeout(20):
            waiting = asyncio.create_task(connections.post(url, "/generate", b"{}"))
            await asyncio.sleep(0.1)
            file.write({url: moved_to})
            with pytest.raises(ConnectionFailed, match="restarted on another port"):
                await waiting
            return await connections.post(url, "/generate", b"{}")

    with server([None]) as (url, _), server([OK]) as (new, requests):
        assert asyncio.run(run(url, new)) == Answer(200, b"{}") and requests == [0]


def test_hundreds_of_responses_use_as_many_connections_as_slots():
    behavior = Behavior(slots=20, median=30, sigma=0.7, seconds_per_token=0.0005)
    prompts = [Prompt(i, (5, 6, i), "") for i in range(50)]
    with StubEngine(behavior) as stub:
        engine = VllmEngine([stub.url], lambda ids: f"{len(ids)} tokens", max_num_seqs=20)
        groups = engine.generate(prompts, 8, SamplingParams(1.0, 200), seed=3)
        metrics = asyncio.run(metrics_of(stub.url))
    assert len(groups) == 50 and all(r.text == f"{len(r.response_ids)} tokens" for group in groups for r in group)
    assert metrics["stub:requests_total"] == 400 and metrics["stub:most_running"] == 20
    assert metrics["stub:connections_total"] <= 20 + 10  # metrics are requested once in half a second


def test_long_responses_are_read_in_threads_as_the_naive_reader_reads_them():
    behavior, threads = Behavior(median=3000, sigma=0.2, seconds_per_token=1e-6), set()

    def decode(ids):
        threads.add(threading.current_thread().name)
        return str(sum(ids))

    with StubEngine(behavior) as stub:
        group = VllmEngine([stub.url], decode).generate([Prompt(0, (5,), "")], 4, SamplingParams(1.0, 9000), seed=3)[0]
        params = {"n": 4, "seed": derive_seed(3, 0, 0), "max_tokens": 9000}
        body = {"token_ids": [5], "sampling_params": params}
        choices = httpx.post(f"{stub.url}/inference/v1/generate", json=body).json()["choices"]
    assert [list(rollout.response_ids) for rollout in group] == [choice["token_ids"] for choice in choices]
    for rollout, one in zip(group, choices, strict=True):
        values = np.array([entry["logprob"] for entry in one["logprobs"]["content"]], np.float32)
        assert list(rollout.rollout_logprobs) == values.tolist() and rollout.text == str(sum(one["token_ids"]))
    assert threads and threading.main_thread().name not in threads


async def metrics_of(url):
    async with Connections({}, 30.0) as connections:
        text = (await connections.post(url, "/metrics", b"{}")).content.decode()
    return {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines()}


def test_the_soft_limit_of_open_files_is_raised_and_a_low_hard_limit_is_an_error(monkeypatch):
    limits, made = [1024, 9000], []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: made.append(both))
    raise_open_files(9000 - open_files.OTHER_FILES)
    assert made == [(9000, 9000)]
    with pytest.raises(
        ValueError, match=r"may open 9,000 files, and 20,000 requests at once need 21,024; .*ulimit -Hn"
    ):
        raise_open_files(20_000)
    limits[1] = resource.RLIM_INFINITY
    raise_open_files(20_000)


@contextlib.contextmanager
def teacher_server(answers):
    """The address of a server that gives these answers, (status, JSON value), one to each request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            status, value = answers.pop(0)
            self.send_response(status)
            body = json.dumps(value).encode()
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args): ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


def said(*tokens):
    """A response of vLLM with (token id, log-prob) by rank at each token of the prompt."""
    rows = [{str(t): {"logprob": v, "rank": i + 1} for i, (t, v) in enumerate(row)} for row in tokens]
    return 200, {"choices": [{"prompt_logprobs": [None, *rows]}]}


def test_a_teachers_server_is_asked_again_after_errors_and_named_after_four(monkeypatch):
    import torch

    from megagrpo.config import TeacherSection
    from megagrpo.data.packing.sample_packing import PackingRules, pack
    from megagrpo.engine.served_teacher import ServedTeacher
    from megagrpo.policy.teacher import Teacher
    from megagrpo.train_types import TrainSample
    from tests.rank_fakes import OneRank

    @dataclass(frozen=True)
    class Alone(OneRank):
        is_dp_leader: bool = True
        is_last_stage: bool = True
        ends: None = None

    async def at_once(seconds):
        return None

    ids, mask = torch.tensor([5, 6, 7]), torch.tensor([False, False, True])
    batch = pack([TrainSample(ids, mask, torch.zeros(3), 1.0, index=0)], PackingRules(max_tokens=8, sequence_align=4))
    (m,) = batch.micro_batches
    right = said([(6, -0.5)], [(9, -0.25), (7, -9999.0)])
    with monkeypatch.context() as patched:
        patched.setattr("megagrpo.engine.served_teacher.asyncio.sleep", at_once)
        answers = [(500, {}), (200, {"choices": []}), said([(6, 0.0)], [(9, math.nan), (7, -1.0)]), right, right]
        with teacher_server(answers) as url:
            served = ServedTeacher(TeacherSection(path="t", urls=[url], over=2), "algorithm.teacher.0", Alone())
            (top,), (row,) = served.top_logprobs(batch, 2), served.logprobs(batch)
        assert top.logprobs[m.loss_mask].tolist() == [[-0.25, -9999.0]]
        assert top.token_ids[m.loss_mask].tolist() == [[9, 7]] and top.token_ids.dtype == torch.int64
        assert row[m.loss_mask].tolist() == [-9999.0] and not row[~m.loss_mask].any()
        (term,) = Teacher("t", served, served.section, None)._terms(m, None, row, 2.0)  # the teacher excludes the token
        assert not term.weights[m.loss_mask].any() and (term.weights[~m.loss_mask] == 2).all()
        assert term.logprobs.isfinite().all()
        for answers, problem in (([(503, {})] * 4, "503|status|{}"), ([(400, {"error": {"message": "long"}})], "long")):
            with (
                teacher_server(answers) as url,
                pytest.raises(EngineError, match=f"teacher.0.urls: {url}: ({problem})"),
            ):
                replace(served, section=TeacherSection(path="t", urls=[url], over=2)).logprobs(batch)
