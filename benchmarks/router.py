"""CPU cost per request of the client of vLLM servers: thousands of prompts at once, against stand-ins with delayed
responses.

    python benchmarks/router.py --requests 10000 --servers 4 --seconds 2 --failing 0.01

The stand-ins are separate processes with real sockets, and drop the connection of one request in a hundred in the
middle of its response. Every prompt must come back once, with the tokens computed from its seed; the script fails
otherwise. `CPU ms` is the client's CPU time for one request: building it, sending it, reading and checking 32 tokens
with log-probs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import derive_seed
from megagrpo.types import Prompt, SamplingParams

TOKENS = 32


def answer(seed: int) -> list[int]:
    """The tokens computed from a seed."""
    return [(seed + k) % 50_000 for k in range(TOKENS)]


def stand_in(told: Connection, seconds: float, failing: float) -> None:
    """Serve until killed; prints its port."""
    served = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # an aborted health check
            return writer.close()
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        body = json.loads(await reader.readexactly(length) or b"null")
        text = b"{}"
        if body is not None:
            await asyncio.sleep(seconds)
            ids = answer(body["sampling_params"]["seed"])
            token: dict[str, object] = {"token": "", "logprob": -0.5, "bytes": None, "top_logprobs": []}
            content = [token | {"token_id": i} for i in ids]
            choice = {"index": 0, "token_ids": ids, "finish_reason": "length", "logprobs": {"content": content}}
            text = json.dumps({"choices": [choice]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text))
        served += body is not None
        writer.write(
            text[: len(text) // 2] if body is not None and failing and served % int(1 / failing) == 0 else text
        )
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=4096)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    _many_files()
    asyncio.run(serve())


def _many_files() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0, help="that a stand-in takes for one answer")
    parser.add_argument("--failing", type=float, default=0.01, help="share of answers that break off")
    given = parser.parse_args()
    _many_files()
    ports, processes = [], []
    for _ in range(given.servers):
        here, there = multiprocessing.Pipe()
        processes.append(
            multiprocessing.Process(target=stand_in, args=(there, given.seconds, given.failing), daemon=True)
        )
        processes[-1].start()
        ports.append(here.recv())
    try:
        engine = VllmEngine(
            [f"http://127.0.0.1:{port}" for port in ports], str, max_num_seqs=given.requests, patience=30.0
        )
        prompts = [Prompt(i, tuple(range(64)), "") for i in range(given.requests)]
        began, busy = time.perf_counter(), time.process_time()
        finished = sorted(engine.groups(prompts, 1, SamplingParams(1.0, TOKENS), 0))
        wall, cpu = time.perf_counter() - began, time.process_time() - busy
    finally:
        for process in processes:
            process.kill()
    assert [index for index, _ in finished] == list(range(given.requests)), "a prompt was lost, or came twice"
    for prompt, (_, (rollout,)) in zip(prompts, finished, strict=True):
        assert list(rollout.response_ids) == answer(derive_seed(0, prompt.prompt_id, 0)), (
            "a prompt got another one's answer"
        )
    print(
        f"{given.requests} requests at once, {given.servers} servers, {given.seconds:g} s each, {given.failing:.0%} "
        "broken off: none lost"
    )
    print(f"{wall:.2f} s in all, {given.requests / wall:.0f} requests/s, CPU ms {1e3 * cpu / given.requests:.2f}")


if __name__ == "__main__":
    main()
