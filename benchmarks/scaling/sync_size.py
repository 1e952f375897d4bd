"""Plans one weight sync of a config without a GPU: the transfers, their balance, and the seconds at a given link speed.

    python -m benchmarks.scaling.sync_size megagrpo:qwen3_30b_a3b_1node 8           # 8 ranks
    python -m benchmarks.scaling.sync_size my_run.yaml 8 rollout.tp=4 --link 25     # links of 25 GB/s

The plan is exact except for the seconds. They count only the busiest link, at the stated speed, without other traffic.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.scaling.loader_slices import EngineLayout, wanted_boxes
from benchmarks.scaling.planned_blocks import held_boxes
from megagrpo.config import ParallelSection, RunConfig, load_config
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.boxes import size
from megagrpo.families.weight_sources import shape_folder
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.sync.trainer_side.send_plan import NO_FEEDER, feeders
from megagrpo.weights.slices.sync_plan import Transfers, plan_transfers

LINK_GB_PER_S = 50.0  # rate into and out of each device: one 400 Gbit/s network card
MESSAGE_SECONDS = 20e-6  # latency of one message


@dataclass(frozen=True)
class SyncPlan:
    """One sync's transfers from `num_sources` trainer ranks to `num_workers` workers, `element_bytes` per element.

    With a relay the ranks send to `direct_servers` servers only, and these pass the weights on."""

    transfers: Transfers
    engine: EngineLayout
    num_sources: int
    num_workers: int
    wanted: int  # elements that all workers load, summed
    element_bytes: int
    direct_servers: int
    num_layers: int

    @property
    def chain(self) -> int:
        """Largest number of servers through which weights pass."""
        return -(-self.engine.servers // self.direct_servers)

    def seconds(self, link_gb_per_s: float) -> tuple[float, str]:
        """Return the busiest end's seconds for its bytes and messages, and its name. Sending and receiving overlap. In
        a chain each server is at most one layer behind the server before it."""
        sources, workers, _ = self.transfers.messages
        ends = {}
        for kind, index, elements, count in (
            ("rank", sources, self.transfers.sent(self.num_sources), self.num_sources),
            ("worker", workers, self.transfers.received(self.num_workers), self.num_workers),
        ):
            waiting = np.bincount(index, minlength=count) * MESSAGE_SECONDS
            times = elements * self.element_bytes / (link_gb_per_s * 1e9) + waiting
            ends[f"{kind} {int(times.argmax())}"] = float(times.max())
        busiest = max(ends, key=ends.__getitem__)
        behind = (self.chain - 1) * max(time for name, time in ends.items() if "worker" in name) / self.num_layers
        return ends[busiest] + behind, busiest


def plan_sync(
    model: HfConfig,
    parallel: ParallelSection,
    world_size: int,
    engine: EngineLayout,
    element_bytes: int,
    relay: bool = False,
) -> SyncPlan:
    """Return the plan for these two layouts. Raises ValueError when the model cannot be sharded into either."""
    alone = init_layout(ParallelSection())
    try:
        shapes, holders = held_boxes(model, parallel, world_size, alone)
    finally:
        alone.close()
    wanted = wanted_boxes(shapes, model, engine)
    elements = sum(size(box) * len(workers) for boxes in wanted.values() for box, workers in boxes.items())
    workers, direct = engine.servers * engine.workers, engine.servers
    if relay:
        alike = [str(worker) for worker in range(engine.workers)] * engine.servers
        direct = feeders(alike, [engine.workers] * engine.servers, world_size).count(NO_FEEDER) // engine.workers
        wanted = wanted_boxes(shapes, model, replace(engine, servers=direct))
    transfers = plan_transfers(holders, wanted)
    return SyncPlan(transfers, engine, world_size, workers, elements, element_bytes, direct, model.num_layers)


def rows_of(config: RunConfig, world_size: int, link_gb_per_s: float = LINK_GB_PER_S) -> list[tuple[str, str]]:
    """Return the plan of a config as (name, text) rows. Raises ValueError when vLLM cannot shard the model as `rollout`
    requires."""
    r = config.rollout
    engine = EngineLayout(tp=r.tp, pp=r.pp, ep=r.tp * r.dp if r.enable_expert_parallel else 1, servers=r.servers)
    model = load_hf_config(shape_folder(config.model.path))
    made = plan_sync(model, config.parallel, world_size, engine, config.model.weight_bytes, r.weight_sync_relay)
    return sync_rows(made, link_gb_per_s)


def sync_rows(made: SyncPlan, link_gb_per_s: float = LINK_GB_PER_S) -> list[tuple[str, str]]:
    """Return the plan as (name, text) rows."""
    moved, one, engine = made.transfers, made.element_bytes, made.engine
    links = moved.links()
    _, _, messages = moved.messages
    seconds, busiest = made.seconds(link_gb_per_s)
    cuts = "".join(f" x {name} {count}" for name, count in (("pp", engine.pp), ("ep", engine.ep)) if count > 1)
    pairs = made.num_sources * made.num_workers
    servers = f"{engine.servers} server(s) of {engine.workers} worker(s), tp {engine.tp}{cuts}"
    fullest = _bytes(max(links.values()) * one)
    packed = f"{_bytes(messages.mean() * one)} on average, packed from {len(moved.source):,} slices"
    rates = f"{link_gb_per_s:g} GB/s a link and {MESSAGE_SECONDS * 1e6:g} us a message"
    passing = f"{engine.servers} server(s), {made.direct_servers} of them from ranks; at most {made.chain} in a chain"
    return [
        ("sync", f"{made.num_sources:,} rank(s) -> {servers}"),
        ("moved", f"{_bytes(moved.total * one)}; the workers want {_bytes(made.wanted * one)}, each element once"),
        *([("relay", passing)] if made.chain > 1 else []),
        ("sent", _spread(moved.sent(made.num_sources) * one, "rank")),
        ("received", _spread(moved.received(made.direct_servers * engine.workers) * one, "worker")),
        ("links", f"{len(links):,} of {pairs:,} rank-worker pairs; the fullest carries {fullest}"),
        ("messages", f"{len(messages):,}, {packed}"),
        ("seconds", f"{seconds:.3g} at {rates}; {busiest} is the busiest"),
    ]


def _spread(totals: np.ndarray, who: str) -> str:
    """Return mean, maximum and their ratio, as text."""
    average, largest = totals.mean(), totals.max()
    return f"{_bytes(average)} by each {who} on average, {_bytes(largest)} at most: {largest / average:.2f} x"


def _bytes(count: float) -> str:
    unit = next((unit for unit in ("TB", "GB", "MB", "kB") if count >= 1000 ** (1 + "kMGT".index(unit[0]))), "B")
    return f"{count / 1000 ** (1 + 'kMGT'.index(unit[0])):,.3g} {unit}" if unit != "B" else f"{count:.0f} B"


def main() -> None:
    """Print the plan of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", help="a YAML file, or a shipped config such as megagrpo:qwen3_30b_a3b_1node")
    parser.add_argument("ranks", type=int, help="ranks of the trainer")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--link", type=float, default=LINK_GB_PER_S, help="GB/s into and out of each device")
    asked = parser.parse_args()
    for name, text in rows_of(load_config(asked.config, asked.overrides), asked.ranks, asked.link):
        print(f"{name:<10}{text}")


if __name__ == "__main__":
    main()
