"""A stub of a vLLM server: real HTTP in its own process, a long tail of response lengths, and no model.

    python benchmarks/stub_engine.py --port 8000 --slots 256 --median 500 --seconds-per-token 0.001

`POST /inference/v1/generate` answers as vLLM does, with the same JSON (about 97 bytes a token): `slots` sequences run
at once, each for its number of tokens times `seconds_per_token`; others wait in order of arrival. The length of a
sequence is lognormal around `median`. It depends on its seed, and for `prompt_share` of its variance on its prompt, so
the order of requests changes no response. With n > 1, sequence i has the seed `seed + i`, and the response is sent when
the last sequence has ended.

`GET /metrics` has `vllm:num_requests_running` and `vllm:num_requests_waiting`, and `stub:requests_total`,
`stub:connections_total` and `stub:most_running`. Every other route answers `{}`, or what `ROUTES` has.

In Python: `with StubEngine(slots=256) as stub: ... stub.url`. `ideal_seconds` is the lower bound of list scheduling.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import resource
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_TOKENS = 65536  # of a response
ROUTES = {
    "/get_world_size": {"world_size": 1},
    "/is_paused": {"is_paused": False},
    "/collective_rpc": {"results": ["none"]},
}


@dataclass(frozen=True)
class Behavior:
    """What a stub does: sequences at once, lengths of responses, time per token, weight version of its responses."""

    slots: int = 256
    median: float = 500.0  # tokens
    sigma: float = 1.0  # of the logarithm of the length
    seconds_per_token: float = 0.001
    version: str = "default"
    prompt_share: float = 0.0  # of the variance of the logarithm of the length

    def length(self, seed: int, max_tokens: int, prompt: Sequence[int] = ()) -> int:
        """Return the number of tokens of the sequence with this seed after this prompt."""
        deviation = math.sqrt(1 - self.prompt_share) * random.Random(seed).gauss()
        if self.prompt_share:
            deviation += math.sqrt(self.prompt_share) * random.Random(hash(tuple(prompt))).gauss()
        return max(1, min(max_tokens, MAX_TOKENS, round(self.median * math.exp(self.sigma * deviation))))


def ideal_seconds(lengths: Sequence[int], behavior: Behavior, servers: int = 1) -> float:
    """Return the lower bound of the time that sequences of these lengths take: all slots busy, or the longest one."""
    return behavior.seconds_per_token * max(sum(lengths) / (behavior.slots * servers), max(lengths))


class Entries:
    """Token ids of `vocabulary` and log-prob entries as JSON, rendered once: a response is a slice of each."""

    def __init__(self, vocabulary: Sequence[int] = range(1000, 151_000)) -> None:
        count = 2 * MAX_TOKENS
        self.ids = [vocabulary[k * 7919 % len(vocabulary)] for k in range(count)]
        self.logprobs = [-((k * 2654435761) % 1000003) / 400_000 - 1e-7 for k in range(count)]
        self._ids, self._id_ends = self._join(str(token) for token in self.ids)
        pairs = zip(self.ids, self.logprobs, strict=True)
        self._content, self._content_ends = self._join(
            json.dumps({**entry, "top_logprobs": [entry]}, separators=(",", ":"))
            for entry in ({"token_id": token, "logprob": value, "rank": 1} for token, value in pairs)
        )

    @staticmethod
    def _join(parts: Iterable[str]) -> tuple[bytes, list[int]]:
        encoded, ends = [part.encode() for part in parts], [-1]
        for part in encoded:
            ends.append(ends[-1] + len(part) + 1)
        return b",".join(encoded), ends

    def choice(self, index: int, seed: int, length: int, reason: str, version: str) -> bytes:
        """Return one choice of a response as JSON: `length` tokens from a position that depends on the seed."""
        start = seed % MAX_TOKENS
        ids = self._ids[self._id_ends[start] + 1 : self._id_ends[start + length]]
        content = self._content[self._content_ends[start] + 1 : self._content_ends[start + length]]
        span = json.dumps([{"version": version, "start": 0, "end": length}]).encode()
        head = b'{"index":%d,"logprobs":{"content":[%s]},"finish_reason":"%s",' % (index, content, reason.encode())
        return head + b'"stop_reason":null,"token_ids":[%s],"routed_experts":null,"weight_versions":%s}' % (ids, span)


class Engine:
    """The queue of sequences: `slots` run at once, the others wait in order of arrival."""

    def __init__(self, behavior: Behavior):
        self.behavior, self.entries = behavior, Entries()
        self.version, self.running, self.most, self.requests, self.connections = behavior.version, 0, 0, 0, 0
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()

    async def generate(self, body: dict[str, Any]) -> bytes:
        """Return the response to a request as JSON once its last sequence has ended."""
        self.requests += 1
        params = body["sampling_params"]
        seeds = [params["seed"] + index for index in range(params.get("n", 1))]
        lengths = [self.behavior.length(seed, params["max_tokens"], body["token_ids"]) for seed in seeds]
        await asyncio.gather(*(self._sequence(length) for length in lengths))
        choices = [
            self.entries.choice(i, seed, length, "length" if length == params["max_tokens"] else "stop", self.version)
            for i, (seed, length) in enumerate(zip(seeds, lengths, strict=True))
        ]
        return b'{"request_id":"stub","model":"policy","choices":[%s]}' % b",".join(choices)

    def _sequence(self, length: int) -> asyncio.Future[None]:
        ended = asyncio.get_running_loop().create_future()
        self._waiting.append((length * self.behavior.seconds_per_token, ended))
        self._admit()
        return ended

    def _admit(self) -> None:
        while self._waiting and self.running < self.behavior.slots:
            seconds, ended = self._waiting.popleft()
            if not ended.cancelled():
                self.running += 1
                self.most = max(self.most, self.running)
                asyncio.get_running_loop().call_later(seconds, self._end, ended)

    def _end(self, ended: asyncio.Future[None]) -> None:
        self.running -= 1
        if not ended.done():
            ended.set_result(None)
        self._admit()

    def metrics(self) -> bytes:
        """Return the gauges in the format of Prometheus."""
        label, waiting = '{engine="0",model_name="policy"}', sum(not one.cancelled() for _, one in self._waiting)
        rows = {"vllm:num_requests_running": self.running, "vllm:num_requests_waiting": waiting}
        rows |= {"stub:requests_total": self.requests, "stub:connections_total": self.connections}
        rows |= {"stub:most_running": self.most}
        return "".join(f"{name}{label} {float(value)}\n" for name, value in rows.items()).encode()


class Connection(asyncio.Protocol):
    """One kept connection: one request at a time, with `content-length`."""

    def __init__(self, engine: Engine):
        self._engine, self._received = engine, bytearray()
        self._task: asyncio.Task[None] | None = None
        engine.connections += 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()  # as vLLM aborts the request of a client that has gone

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._received[:end])
        _, _, rest = head.lower().partition(b"\r\ncontent-length:")
        length = int(rest.split(b"\r\n", 1)[0] or 0) if rest else 0
        if len(self._received) < end + 4 + length:
            return
        body = bytes(self._received[end + 4 : end + 4 + length])
        del self._received[: end + 4 + length]
        self._task = asyncio.get_running_loop().create_task(self._answer(head.split(b" ", 2)[1].decode(), body))

    async def _answer(self, target: str, body: bytes) -> None:
        path, _, _parameters = target.partition("?")
        kind = b"application/json"
        if path == "/inference/v1/generate":
            answer = await self._engine.generate(json.loads(body))
        elif path.rstrip("/") == "/metrics":
            answer, kind = self._engine.metrics(), b"text/plain"
        else:
            if path == "/update_weight_version":
                self._engine.version = json.loads(body)["new_version"]
            answer = json.dumps(ROUTES.get(path, {})).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(answer))
        self._transport.writelines([head, answer])  # type: ignore[attr-defined]


class StubEngine:
    """A stub in its own process. A context manager; `url` is its address."""

    def __init__(self, behavior: Behavior = Behavior(), port: int = 0):
        words = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(behavior).items()]
        command = [sys.executable, str(Path(__file__)), f"--port={port}", *words]
        self.behavior, self.process = behavior, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None, "the process writes its address to a pipe"
        self.url = self.process.stdout.readline().strip()

    def __enter__(self) -> StubEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()


async def serve(behavior: Behavior, host: str, port: int) -> None:
    """Serve until the process is killed. Prints the address."""
    engine = Engine(behavior)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), host, port, backlog=4096)
    print(f"http://{host}:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    for name, value in asdict(Behavior()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = vars(parser.parse_args())
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    host, port = args.pop("host"), args.pop("port")
    asyncio.run(serve(Behavior(**args), host, port))


if __name__ == "__main__":
    main()
