"""Measures how long ranks of many nodes take to find each other, with the launcher's own code on one machine.

    python benchmarks/rendezvous.py --ranks 64 256 1024

Each simulated node is a fork of this process that runs torchrun's agent as `megagrpo.cluster.launch.node` does. The
agent of the first node serves the store. In place of a training program each rank is a fork of its agent, which joins
the world over gloo (`join_world`), reduces a small tensor as often as a step does, and ends. Forks share the pages of
torch, so a rank takes 10 MB. The processes share this machine's cores: on a cluster each node has its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by its path, this file sees only its own folder

import torch
import torch.distributed.run
from torch import distributed as dist

from megagrpo.cluster.launch import launcher_rendezvous
from megagrpo.cluster.launch.launcher_rendezvous import Nodes
from megagrpo.cluster.launch.local import run_ranks, set_thread_environment
from megagrpo.loopback import LOOPBACK, LOOPBACK_ADDRESS
from megagrpo.platform.parallel.host_messages import all_reduce
from megagrpo.platform.parallel.rank_rendezvous import join_world
from megagrpo.platform.process.variables import ENVIRONMENT, TOKEN_FILE_VARIABLE

MESSAGES = 5  # small all-reduces per rank


class Start(NamedTuple):
    """Seconds from the first fork until a state was reached."""

    ranks: int
    nodes: int
    first_rank: float  # the first rank has begun: all agents have met
    begun: float  # all ranks have begun
    joined: float  # all ranks are in the world
    first_message: float  # all ranks have reduced a tensor: lazy connections are open
    message: float  # a further small all-reduce, the median over ranks
    ended: float  # no process is left
    store_cpu: float  # CPU seconds of the first agent, which serves the store
    private_mb: float  # private memory of a rank, the largest


def measure(ranks: int, ranks_per_node: int = 8, timeout: float = 500.0) -> Start:
    """Start `ranks` ranks on simulated nodes, wait until all processes have ended, and return the seconds."""
    nodes, gone = ranks // ranks_per_node, multiprocessing.get_context("fork")
    reading, writing = os.pipe()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the garbage collector would touch, and so copy, every page that forks share
    with tempfile.TemporaryDirectory() as folder, _variables(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks; the parent's threads are torch's idle helpers
        with launcher_rendezvous.listen(f"{LOOPBACK_ADDRESS}:0") as probe:
            port = probe.getsockname()[1]
        begin = time.monotonic()
        agents = []
        for node in range(nodes):
            at = Nodes(node, nodes, LOOPBACK_ADDRESS, port)
            agents.append(gone.Process(target=_agent, args=(at, ranks_per_node, writing, timeout)))
            agents[-1].start()
        os.close(writing)
        lines = _lines(reading)  # until no process holds the other end of the pipe
        ended = time.monotonic() - begin
        for agent in agents:
            agent.join()
    failed = [agent.exitcode for agent in agents if agent.exitcode]
    store = sum(line.pop("store_cpu", 0.0) for line in lines)
    lines = [line for line in lines if line]
    assert not failed and len(lines) == ranks, f"{len(lines)} of {ranks} ranks ended; agents' exit codes {failed}"
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    seconds = {name: max(columns[name]) - begin for name in ("begun", "joined", "first_message")}
    return Start(
        ranks,
        nodes,
        min(columns["begun"]) - begin,
        **seconds,
        message=statistics.median(columns["message"]),
        ended=ended,
        store_cpu=store,
        private_mb=max(columns["private_mb"]),
    )


def _agent(nodes: Nodes, ranks: int, report: int, timeout: float) -> None:
    """Run one node: the launcher's `run_ranks`, with `_rank` in place of the command."""
    made = torch.distributed.run.config_from_args

    def forked(arguments: argparse.Namespace) -> tuple[Any, Any, list[Any]]:
        config, _, _ = made(arguments)
        config.start_method = "fork"
        return config, _rank, [report, timeout]

    set_thread_environment(ranks)
    with mock.patch.object(torch.distributed.run, "config_from_args", forked):
        code = run_ranks(ranks, ["stub.py"], nodes)
    if nodes.rank == 0:
        os.write(report, (json.dumps({"store_cpu": time.process_time()}) + "\n").encode())
    sys.exit(code)


def _rank(report: int, timeout: float) -> None:
    """Do what a rank does at its start, and a few small messages. Writes a line of JSON to the pipe `report`."""
    times = {"begun": time.monotonic()}
    join_world("gloo", timedelta(seconds=timeout))
    times["joined"] = time.monotonic()
    group, values = dist.group.WORLD, torch.ones(8)
    assert group is not None, "join_world creates the default group"
    all_reduce(values, "sum", group)
    times["first_message"] = time.monotonic()
    for _ in range(MESSAGES):
        total = all_reduce(values, "sum", group)
    times["message"] = (time.monotonic() - times["first_message"]) / MESSAGES
    assert total[0] == dist.get_world_size(), f"the sum over the ranks is {total[0]}"
    times["private_mb"] = _private_mb()
    dist.barrier()
    dist.destroy_process_group()
    os.write(report, (json.dumps(times) + "\n").encode())  # one write, so lines do not mix


def _private_mb() -> float:
    """Return the memory of this process that it shares with no other."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(row[1]) for row in rows if row[0].startswith("Private")) / 1024


def _lines(reading: int) -> list[dict[str, float]]:
    with os.fdopen(reading) as pipe:
        return [json.loads(line) for line in pipe]


@contextlib.contextmanager
def _variables(folder: str) -> Iterator[None]:
    """Give the nodes a token, as a job does, and let gloo listen on loopback."""
    token = Path(folder, "token")
    token.write_text("0" * 64)
    token.chmod(0o600)
    with mock.patch.dict(ENVIRONMENT, {TOKEN_FILE_VARIABLE: str(token), "GLOO_SOCKET_IFNAME": LOOPBACK}):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--per-node", type=int, default=8)
    options = parser.parse_args()
    print("ranks  nodes  agents met  all begun  all joined  first message  message ms  all ended  store CPU  MB a rank")
    for ranks in options.ranks:
        s = measure(ranks, options.per_node)
        print(
            f"{s.ranks:5}  {s.nodes:5}  {s.first_rank:8.1f} s  {s.begun:7.1f} s  {s.joined:8.1f} s  "
            f"{s.first_message:11.1f} s  {s.message * 1000:10.1f}  {s.ended:7.1f} s  "
            f"{s.store_cpu:7.1f} s  {s.private_mb:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
