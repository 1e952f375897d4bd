"""The client of the servers against a stub engine: busy slots with a long tail of response lengths, the client's own
CPU time, and 20,000 requests at once."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

from benchmarks.scaling.table import Point, Series, cpu_seconds
from benchmarks.stub_engine import Behavior, StubEngine, ideal_seconds
from megagrpo.engine.client import VllmEngine
from megagrpo.types import Prompt, SamplingParams

SLOTS, SEQUENCES, LONGEST = 64, 512, 800
GROUPS = (1, 8, 16)
REQUESTS = (2_000, 20_000)
OTHER_FILES = 64  # open files of a process beside its connections


def generated(
    stub: StubEngine, prompts: int, n: int, slots: int, longest: int = 65536
) -> tuple[float, float, list[int]]:
    """Return the wall seconds and this process's CPU seconds of generating `n` responses to each prompt, and the
    lengths of the responses."""
    engine = VllmEngine([stub.url], lambda ids: "", max_num_seqs=slots, patience=60.0)
    asked = [Prompt(index, tuple(range(64)), "") for index in range(prompts)]
    lengths: list[int] = []

    def work() -> None:
        for _, rollouts in engine.groups(asked, n, SamplingParams(1.0, longest), 0):
            lengths.extend(len(rollout.response_ids) for rollout in rollouts)

    wall, cpu = cpu_seconds(work)
    assert len(lengths) == prompts * n, "a response was lost, or came twice"
    return wall, cpu, lengths


def busy_slots() -> Iterator[Series]:
    """Yield the generation time of `SEQUENCES` responses in `SLOTS` slots for each group size, beside the ideal one."""
    # few tokens, each slow: the time is the engine's, and `client_cost` has the client's own
    behavior = Behavior(slots=SLOTS, median=100, sigma=1.0, seconds_per_token=0.005)
    for n in GROUPS:
        with StubEngine(behavior) as stub:
            wall, _, lengths = generated(stub, SEQUENCES // n, n, SLOTS, LONGEST)
        ideal = ideal_seconds(lengths, behavior)
        note = f"{wall / ideal:.2f} of the ideal {ideal:.2f} s"
        yield Series("generation", f"long tail, groups of {n}", "responses", [Point(SEQUENCES, wall)], note)


def client_cost() -> Iterator[Series]:
    """Yield the client's CPU time of many short responses and of few long ones, and both rates."""
    cost = Series("client", "CPU time of the trainer's process", "tokens")
    rates = {}
    for tokens, requests in ((16, 2048), (8192, 128)):
        with StubEngine(Behavior(slots=SLOTS, median=tokens, sigma=0.0, seconds_per_token=0.0)) as stub:
            generated(stub, 64, 1, SLOTS)  # imports and connections
            _, cpu, _ = generated(stub, requests, 1, SLOTS)
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
            generated(stub, requests, 1, requests)
            series.points.append(Point(requests, time.perf_counter() - begun))
    if most < REQUESTS[-1]:
        series.note = f"this machine allows {hard:,} open files a process"
    yield series


def series() -> Iterator[Series]:
    """Yield all series of the client."""
    yield from busy_slots()
    yield from client_cost()
    yield from many_requests()
