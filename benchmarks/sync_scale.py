"""The plan of a weight sync at full size: bytes of ranks and workers, time of planning, and what the store serves.

    python benchmarks/sync_scale.py                  # Qwen3-235B and DeepSeek-V3, 128 to 16,384 ranks, 8 to 64 servers
    python benchmarks/sync_scale.py --ranks 1024 --servers 64

Each row builds the real plan in one process, without weights: `plan` is rank 0's time for it, `rank` and `worker` the
time in which a rank and a worker find their own messages. `sent` and `received` are the bytes of the busiest rank and
worker at 50 GB/s, exact but for the speed. Columns marked * are computed, not run: requests to the store and bytes from
it in a first sync, of ranks and workers together, before (every process reads all boxes) and now; a test counts them.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.scaling.loader_slices import EngineLayout, wanted_boxes
from benchmarks.scaling.planned_blocks import held_boxes
from benchmarks.scaling.sync_size import LINK_GB_PER_S
from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.weight_sources import shape_folder
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.sync.trainer_side.send_plan import PlanNews, feeders, heads, messages_of
from megagrpo.sync.wire.messages import rounds
from megagrpo.sync.wire.rank_boxes import RankBoxes, WorkerBoxes, by_tensor

ELEMENT_BYTES = 2  # bf16
LIMIT = 2**25  # elements in a message of 64 MiB
MODELS = {
    "Qwen/Qwen3-235B-A22B": (
        ParallelSection(tp=4, pp=8, ep=16, etp=1, pipeline_layers=[11, *[12] * 6, 11]),
        EngineLayout(tp=8, ep=8),
    ),
    "deepseek-ai/DeepSeek-V3": (
        ParallelSection(tp=8, pp=16, ep=8, etp=1, pipeline_layers=[3, *[4] * 14, 2]),
        EngineLayout(tp=16, ep=16),
    ),
}


@dataclass(frozen=True)
class Costs:
    """One planned sync. Seconds are measured here; times of the network are computed for LINK_GB_PER_S."""

    plan_seconds: float  # rank 0 chooses the sending ranks
    rank_seconds: float  # a rank finds its messages
    worker_seconds: float
    messages: int
    chain: int  # servers in the longest chain
    sent: tuple[float, float]  # seconds of the busiest rank, and on average
    received: tuple[float, float]  # the same of the workers that the ranks send to
    requests: tuple[int, int]  # to the store in a first sync, before and now; computed
    store_bytes: tuple[int, int]  # that these return; computed
    request_bytes: int  # body of the HTTP request to one server
    resident_gib: float


def costs(boxes: RankBoxes, wanted: Mapping[int, WorkerBoxes], ranks: int, servers: int, relay: bool) -> Costs:
    """Plan a sync of `ranks` ranks to `servers` servers, which `wanted` (worker of a server -> its boxes) describes."""
    per_server = len(wanted)
    workers = {number: wanted[number % per_server] for number in range(servers * per_server)}
    feeder = feeders(
        [str(number % per_server) for number in workers], [per_server] * servers, ranks if relay else 10**9
    )
    head = heads(feeder)
    direct = {number: workers[number] for number in set(head)}
    began = time.perf_counter()
    sources = boxes.sources_for(direct)
    choices = boxes.choices(sources)
    planned = time.perf_counter()
    own = {name for name, held in boxes.holders.items() if any(0 in ranks for ranks in held.values())}
    messages_of(PlanNews(1, direct, choices), boxes, 0, own, LIMIT)
    found = time.perf_counter()
    part = choices[choices[:, 0] == 0]
    rounds(boxes.transfers_to({0: direct[0]}, boxes.sources(part)), LIMIT, destination=0)
    received = time.perf_counter()
    transfers = boxes.transfers_to(direct, sources)
    sent, got = transfers.sent(ranks), transfers.received(len(workers))[sorted(direct)]
    text, of_workers = boxes.packed(), [len(json.dumps(of_worker)) for of_worker in wanted.values()]
    parts = len(json.dumps(part[:, 1:].tolist()))
    plain = len(json.dumps([(name, list(held.items())) for name, held in boxes.holders.items()]))
    rate = LINK_GB_PER_S * 1e9 / ELEMENT_BYTES
    members = ranks + len(workers)
    return Costs(
        plan_seconds=planned - began,
        rank_seconds=found - planned,
        worker_seconds=received - found,
        messages=len(transfers.messages[0]),
        chain=max(head.count(first) for first in set(head)),
        sent=(sent.max() / rate, sent.mean() / rate),
        received=(got.max() / rate, got.mean() / rate),
        requests=(members * (1 + per_server) + len(workers), 2 * len(workers)),
        store_bytes=(members * sum(of_workers) + len(workers) * plain, len(workers) * (parts + 200)),
        request_bytes=len(text),
        resident_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )


def planned(name: str, ranks: int) -> tuple[RankBoxes, dict[int, WorkerBoxes]]:
    """Return the boxes of `ranks` ranks, and of each worker of one server."""
    parallel, engine = MODELS[name]
    parallel = _with_ep(parallel, ranks)
    model, alone = load_hf_config(shape_folder(name)), init_layout(ParallelSection())
    try:
        shapes, holders = held_boxes(model, parallel, ranks, alone)
    finally:
        alone.close()
    boxes_of = wanted_boxes(shapes, model, replace(engine, servers=1))
    pairs: dict[int, list] = {worker: [] for worker in range(engine.workers)}
    for tensor, boxes in boxes_of.items():
        for box, workers in boxes.items():
            for worker in workers:
                pairs[worker].append((tensor, box))
    return RankBoxes({tensor: (shapes[tensor], held) for tensor, held in holders.items()}), {
        worker: by_tensor(of_worker) for worker, of_worker in pairs.items()
    }


def _with_ep(parallel: ParallelSection, ranks: int) -> ParallelSection:
    """Spread the experts over up to 64 ranks of a stage, as far as the ranks of a stage allow."""
    return parallel.model_copy(update={"ep": min(64, ranks // parallel.pp)})


COLUMNS = {
    "model": 14, "ranks": 6, "servers": 7, "chain": 5, "plan s": 6, "rank s": 6, "worker s": 8, "messages": 9,
    "sent s": 6, "received s": 10, "bound": 7, "requests *": 16, "store MB *": 16, "POST kB": 7, "GiB": 5,
}  # fmt: skip


def table(models: list[str], ranks: list[int], servers: list[int]) -> list[str]:
    """Print and return the lines of the table."""
    lines = ["  ".join(f"{name:>{width}}" for name, width in COLUMNS.items())]
    print(lines[0], flush=True)
    for name in models:
        for world in ranks:
            boxes, wanted = planned(name, world)
            for count in servers:
                for relay in (False, True):
                    made = costs(boxes, wanted, world, count, relay)
                    if relay and made.chain == 1:
                        continue
                    lines.append(row(name.split("/")[1][: COLUMNS["model"]], world, count, made))
                    print(lines[-1], flush=True)
    return lines


def row(name: str, ranks: int, servers: int, made: Costs) -> str:
    """Return one line of the table."""
    seconds = [f"{each:.2f}" for each in (made.plan_seconds, made.rank_seconds, made.worker_seconds)]
    bound = "ranks" if made.sent[0] > made.received[0] else "workers"
    before, now = (number / 1e6 for number in made.store_bytes)
    texts = [name, f"{ranks:,}", str(servers), str(made.chain), *seconds, f"{made.messages:,}", f"{made.sent[0]:.2f}"]
    texts += [f"{made.received[0]:.2f}", bound, f"{made.requests[0]:,} -> {made.requests[1]:,}"]
    texts += [f"{before:,.0f} -> {now:.1f}", f"{made.request_bytes / 1e3:.0f}", f"{made.resident_gib:.1f}"]
    return "  ".join(f"{text:>{width}}" for text, width in zip(texts, COLUMNS.values(), strict=True))


def main() -> None:
    """Print the table of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[128, 1024, 16384])
    parser.add_argument("--servers", nargs="+", type=int, default=[8, 16, 64])
    asked = parser.parse_args()
    table(asked.models, asked.ranks, asked.servers)


if __name__ == "__main__":
    main()
