"""Divides the GPUs of a run between its trainer and its vLLM servers, for the search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from megagrpo.config import RolloutSection, RunConfig
from megagrpo.config.sections.placement import placement_problems
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.engine_memory import GIB, ServerMemory
from megagrpo.planner.costs.gpu_specs import GPUS_PER_NODE
from megagrpo.planner.costs.planned_memory import smallest_gpu
from megagrpo.planner.rules.vllm_problems import vllm_can_split


@dataclass(frozen=True)
class Split:
    """A run's config with a number and a size of servers, and the ranks that train beside them."""

    config: RunConfig
    world_size: int


def splits_of(config: RunConfig, model: HfConfig, world_size: int, room: float) -> list[Split]:
    """Return the ways to divide at most the run's GPUs (`world_size` ranks and their servers), the run's own first.

    Servers that do not fit `room` GiB of a GPU get the next `rollout.tp` that does. The number of dedicated servers
    varies, with all other GPUs or fewer for the trainer. Both sides get whole nodes if the run has more than one.
    `rollout.tp` of colocated servers varies, with servers on all GPUs of a node.
    """
    own = _fitting(config, model, room)
    splits = [Split(own, world_size)]
    if own.rollout.placed == "colocated":
        return splits + [Split(made, world_size) for made in _colocated(own, model, world_size)]
    if own.rollout.placed != "dedicated":
        return splits
    size, total = own.rollout.devices_per_server, world_size + config.rollout.server_gpus
    node = gcd(total, GPUS_PER_NODE) if total > GPUS_PER_NODE else 1
    ranks = {count for count in _round_numbers(total - 1) if count % node == 0}
    servers = {*_round_numbers(total // size), *((total - count) // size for count in ranks)} - {0}
    for count in sorted(servers):
        made = _with_servers(own, servers=count)
        rest = (total - count * size) // node * node
        if count * size % node == 0 and not any(placement_problems(made)):
            splits += [Split(made, world) for world in sorted({rest, *ranks}) if 0 < world <= rest]
    return splits


def _colocated(config: RunConfig, model: HfConfig, world_size: int) -> Iterator[RunConfig]:
    """Yield the config with other sizes of colocated servers that vLLM can shard, as many as a node's ranks hold."""
    r, nodes = config.rollout, config.run.nodes
    for tp in (1, 2, 4, 8):
        count = nodes * (world_size // nodes // (tp * r.pp * r.dp))
        if not count or r.nodes_per_server > 1 or not vllm_can_split(model, tp, r.enable_expert_parallel):
            continue
        made = _with_servers(config, tp=tp, servers=count)
        if made != config and not any(placement_problems(made)):
            yield made


def _fitting(config: RunConfig, model: HfConfig, room: float) -> RunConfig:
    """Return the config with the least `rollout.tp`, its own or a multiple by powers of two in a node, whose servers
    fit `room` GiB on as many GPUs; the config itself if none does."""
    r = config.rollout
    alone = {"sync": {"weights": 0.0, "staging": 0.0}, "generate": {}}  # a GPU without a trainer rank
    for factor in (1, 2, 4, 8):
        tp = r.tp * factor
        if r.devices_per_node * factor > GPUS_PER_NODE or r.servers % factor or not vllm_can_split(model, tp):
            continue
        made = _with_servers(config, tp=tp, servers=r.servers // factor)
        server = ServerMemory.of(made, model)
        if smallest_gpu(made, alone, server.parts(), server.reload_bytes() / GIB) <= room:
            return made
    return config


def _with_servers(config: RunConfig, **sizes: int) -> RunConfig:
    rollout: RolloutSection = config.rollout.model_copy(update=sizes)
    return config.model_copy(update={"rollout": rollout})


def _round_numbers(limit: int) -> list[int]:
    """Return the numbers up to `limit` with at most three significant bits: 1 to 8, 10, 12, 14, 16, 20, ..."""
    return [
        digits << shift for shift in range(limit.bit_length()) for digits in (1, 5, 3, 7) if digits << shift <= limit
    ]
