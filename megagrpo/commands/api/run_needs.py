"""What the run of a config needs of a machine, for `megagrpo doctor`."""

from __future__ import annotations

from megagrpo.cluster.doctor.needs import SMALLEST_DISK, SMALLEST_RAM, SMALLEST_SHM, Needs
from megagrpo.config import RunConfig, weight_path
from megagrpo.families.weight_sources import UnseenModel
from megagrpo.planner import plan
from megagrpo.planner.costs.gpu_specs import GPUS_PER_NODE
from megagrpo.planner.costs.shapes import num_parameters


def needs_of(config: RunConfig, name: str, gpu: bool, world_size: int | None = None) -> Needs:
    """Return what a node needs to run `config`, called `name`, on `world_size` ranks, by default as few as the layout
    needs. With `gpu` the nodes have GPUs."""
    parallel, rollout = config.parallel, config.rollout
    world = world_size or parallel.smallest_world
    made = plan(config, world, GPUS_PER_NODE * 1024.0 if gpu else None, has_data=False, fetch=False)
    parameters = num_parameters(made.model) if made.model is not None else 0
    nodes = max(config.run.nodes, -(-world // GPUS_PER_NODE) if gpu else 1)
    transport = _transport(config, gpu, nodes == 1)
    copies = 2 * config.model.weight_bytes * parameters / 2**30 if transport == "shared_memory" else 0.0
    servers = rollout.servers * rollout.devices_per_server if rollout.placed == "dedicated" else 0
    checkpoint = parameters * (config.model.weight_bytes + 12) / 2**30
    in_ram = sum(made.host.get(purpose, 0.0) for purpose in ("saving", "moments", "offload", "activations"))
    ranks = 0.0 if gpu or not made.memory else world * max(parts["total"] for parts in made.memory.values())
    return Needs(
        source=name,
        gpus=min(GPUS_PER_NODE, -(-world // nodes) + servers) if gpu else 0,
        nodes=nodes,
        shared_memory=max(SMALLEST_SHM, copies),
        ram=max(SMALLEST_RAM, in_ram + ranks + copies),
        disk=max(SMALLEST_DISK, checkpoint),
        one_connection=config.one_connection,
        shares_gpu=rollout.placed == "colocated",
        agents=tuple(agent for task in config.each_task if (agent := task.config.multi_turn.agent) is not None),
        unseen=next((problem.text for problem in made.problems if isinstance(problem, UnseenModel)), ""),
    )


def _transport(config: RunConfig, gpu: bool, one_host: bool) -> str:
    try:
        return weight_path(config, gpu, one_host=one_host)[0]
    except ValueError:
        return ""
