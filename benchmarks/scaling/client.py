"""The client of the servers against a stub engine: busy slots with a long tail of response lengths, the client's own
CPU time, and 20,000 requests at once."""

from __future__ import annotations

import heapq
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from benchmarks.scaling.table import Point, Series, cpu_seconds
from benchmarks.stub_engine import Behavior, StubEngine, ideal_seconds
from megagrpo.engine.client import VllmEngine
from megagrpo.types import Prompt, SamplingParams

SLOTS, SEQUENCES, LONGEST = 64, 1024, 800
GROUPS = (1, 8, 16)
# prompts that determine 70 % of the length, without and with the lengths of an earlier visit
EXPECTED = (("groups of 8, lengths by prompt", 8, None), ("groups of 8, longest expected first", 8, None))
REQUESTS = (2_000, 20_000)
OTHER_FILES = 64  # open files of a process beside its connections


Lengths = dict[int, list[int]]  # by index of the prompt, tokens of each of its responses


def asked(count: int) -> list[Prompt]:
    """Return `count` different prompts of 64 tokens."""
    return [Prompt(index, (*range(63), index), "") for index in range(count)]


def generated(
    stub: StubEngine, prompts: Sequence[Prompt], n: int, slots: int, longest: int = 65536
) -> tuple[float, float, Lengths]:
    """Return the wall seconds and this process's CPU seconds of generating `n` responses to each prompt, and their
    lengths."""
    known = any(prompt.expected_length for prompt in prompts)
    engine = VllmEngine([stub.url], lambda ids: "", max_num_seqs=slots, patience=60.0, longest_first=known)
    lengths: Lengths = {}

    def work() -> None:
        for index, rollouts in engine.groups(prompts, n, SamplingParams(1.0, longest), 0):
            lengths[index] = [len(rollout.response_ids) for rollout in rollouts]

    wall, cpu = cpu_seconds(work)
    assert [len(lengths[i]) for i in range(len(prompts))] == [n] * len(prompts), "a response was lost, or came twice"
    return wall, cpu, lengths


def in_order_seconds(lengths: Sequence[int], behavior: Behavior) -> float:
    """Return the time of sequences that begin in this order, each as soon as a slot is free: no client can do better
    without knowing the lengths."""
    ends = [0.0] * behavior.slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length * behavior.seconds_per_token)
    return max(ends)


def busy_slots() -> Iterator[Series]:
    """Yield the generation time of `SEQUENCES` responses in `SLOTS` slots for each group size, beside the best one."""
    # few tokens, each slow: the time is the engine's, and `client_cost` has the client's own
    usual = Behavior(slots=SLOTS, median=100, sigma=1.0, seconds_per_token=0.0025)
    by_prompt = replace(usual, prompt_share=0.7)
    known: Lengths = {}
    for what, n, behavior in (*((f"groups of {n}", n, usual) for n in GROUPS), *EXPECTED):
        behavior = behavior or by_prompt
        prompts = asked(SEQUENCES // n)
        if "longest" in what:
            prompts = [replace(prompt, expected_length=fmean(known[i])) for i, prompt in enumerate(prompts)]
        with StubEngine(behavior) as stub:
            wall, _, lengths = generated(stub, prompts, n, SLOTS, LONGEST)
        known, flat = lengths, [length for index in sorted(lengths) for length in lengths[index]]
        best, bound = in_order_seconds(flat, behavior), ideal_seconds(flat, behavior)
        note = (
            f"{wall / best:.2f} of {best:.2f} s, when slots are never idle and responses begin in the prompts' order; "
        )
        note += f"{wall / bound:.2f} of {bound:.2f} s, the least for any order"
        yield Series("generation", f"long tail, {what}", "responses", [Point(SEQUENCES, wall)], note)


def client_cost() -> Iterator[Series]:
    """Yield the client's CPU time of many short responses and of few long ones, and both rates."""
    cost = Series("client", "CPU time of the trainer's process", "tokens")
    rates = {}
    for tokens, requests in ((16, 2048), (8192, 128)):
        with StubEngine(Behavior(slots=SLOTS, median=tokens, sigma=0.0, seconds_per_token=0.0)) as stub:
            generated(stub, asked(64), 1, SLOTS)  # imports and connections
            _, cpu, _ = generated(stub, asked(requests), 1, SLOTS)
        cost.points.append(Point(tokens * requests, cpu))
        rates[tokens] = cpu / requests
    per_token = (rates[8192] - rates[16]) / (8192 - 16)
    cost.note = f"{1e3 * (rates[16] - 16 * per_token):.2f} ms a request and {1e6 * per_token:.2f} us a token"
    yield cost


def many_requests(seconds: float = 2.0, tokens: int = 32) -> Iterator[Series]:
    """Yield the time of up to 20,000 requests at once, each of which the stub answers after `seconds`."""
    series = Series("client", f"requests at once, answered after {seconds:g} s", "requests")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(soft, hard) - OTHER_FILES
    for wanted in REQUESTS:
        requests = min(wanted, most)
        behavior = Behavior(slots=requests, median=tokens, sigma=0.0, seconds_per_token=seconds / tokens)
        with StubEngine(behavior) as stub:
            begun = time.perf_counter()
            generated(stub, asked(requests), 1, requests)
            series.points.append(Point(requests, time.perf_counter() - begun))
    if most < REQUESTS[-1]:
        series.note = f"this machine allows {hard:,} open files a process"
    yield series


def series() -> Iterator[Series]:
    """Yield all series of the client."""
    yield from busy_slots()
    yield from client_cost()
    yield from many_requests()
