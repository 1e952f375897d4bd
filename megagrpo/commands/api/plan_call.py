"""`megagrpo.plan`, which is also `megagrpo plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megagrpo.commands.api.inputs.config_input import ConfigLike, Overrides, read
from megagrpo.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from megagrpo.planner import Plan


def plan(
    config: ConfigLike,
    *,
    world_size: int | None = None,
    gpu: str | None = None,
    gpu_memory_gb: float | None = None,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    overrides: Overrides = (),
) -> Plan:
    """Check a run and predict its memory and time, without GPUs, weights or torch.

    Args:
        config: The config, as for `megagrpo.train`.
        world_size: Ranks of the trainer. When left out: with `gpu` those of `run.nodes` nodes with 8 GPUs each, else as
            few as the layout needs.
        gpu: A kind of GPU, `h100`, `h200`, `b200` or `a100`, to predict seconds and memory for.
        gpu_memory_gb: Memory of a GPU in GiB; that of `gpu` when left out.
        prompt_tokens: With `gpu`, average length of a prompt.
        response_tokens: With `gpu`, average length of a response.
        overrides: Values by dotted key, or texts as on the command line.

    Returns:
        The plan. `str(plan)` is what `megagrpo plan` prints. `problems` is empty when the run can start; `memory` is
        phase -> part -> GiB; `times` holds seconds, with `gpu`.

    Raises:
        ConfigError: The config or an argument is wrong. A layout that does not fit is no error: `problems` names it.
    """
    from megagrpo import planner
    from megagrpo.planner.costs.gpu_specs import GPUS
    from megagrpo.planner.costs.workload import expected_lengths

    lengths = {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens}
    _check(gpu, {"world_size": world_size, "gpu_memory_gb": gpu_memory_gb} | lengths)
    validated = read(config, overrides).validated()
    _check_with_config(validated, gpu, lengths)
    ranks, assumed = planned_ranks(validated, world_size, gpu)
    kind = None if gpu is None else GPUS[gpu]
    made = planner.plan(validated, ranks, gpu_memory_gb or (None if kind is None else kind.memory_gib))
    made.rows.extend([("assumed", assumed)] if assumed else [])
    if kind is None:
        return made
    return planner.with_times(made, validated, ranks, kind, expected_lengths(validated, prompt_tokens, response_tokens))


def layouts(config: ConfigLike, overrides: Overrides, sizes: Mapping[str, float], gpu: str | None) -> Sequence[str]:
    """Return a table of the fastest layouts of a config on this kind of GPU. `sizes` are arguments of `plan`. Raises
    ConfigError for a wrong config or argument, and if no layout fits."""
    from megagrpo.families.hf_config import load_hf_config
    from megagrpo.families.weight_sources import shape_folder
    from megagrpo.planner.costs.gpu_specs import GPUS
    from megagrpo.planner.costs.workload import expected_lengths
    from megagrpo.planner.times.layout_search import search, search_table

    lengths = {name: sizes.get(name) for name in ("prompt_tokens", "response_tokens")}
    _check(gpu, {"world_size": sizes.get("world_size")} | lengths)
    if gpu is None or "gpu_memory_gb" in sizes:
        raise ConfigError(f"--search: needs --gpu, one of {', '.join(GPUS)}, whose memory it takes; name it alone")
    run = read(config, overrides).validated()
    _check_with_config(run, gpu, lengths)
    ranks, _ = planned_ranks(run, int(sizes.get("world_size", 0)) or None, gpu)
    model = load_hf_config(shape_folder(run.model.path))
    if found := search(run, model, ranks, GPUS[gpu], expected_lengths(run, *lengths.values())):
        return search_table(found)
    reason = f"no layout of {ranks} ranks fits {gpu} beside vLLM as `rollout` has it"
    raise ConfigError(f"parallel: {reason}; use more ranks, another rollout.tp or rollout.gpu_memory_utilization")


def _check(gpu: str | None, sizes: dict[str, float | None]) -> None:
    """Raise ConfigError for an argument that is out of its range or that nothing reads."""
    from megagrpo.planner.costs.gpu_specs import GPUS

    for name, value in sizes.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name}: must be a positive number (got {value!r})")
    kinds = ", ".join(GPUS)
    if gpu is not None and gpu not in GPUS:
        raise ConfigError(f"gpu: {gpu} is not known; choose one of {kinds}")
    timed = next((name for name in ("prompt_tokens", "response_tokens") if sizes[name]), None)
    if gpu is None and timed is not None:
        raise ConfigError(f"{timed}: predicted seconds need a kind of GPU; add gpu (--gpu), one of {kinds}")


def _check_with_config(config: RunConfig, gpu: str | None, lengths: dict[str, float | None]) -> None:
    """Raise ConfigError for seconds of a run that samples nothing, and for a length above the config's limit."""
    if not config.generates and gpu:
        reason = "the run samples nothing, and its seconds are not predicted"
        raise ConfigError(f"gpu: {reason}; set gpu_memory_gb alone")
    limits = {"prompt_tokens": config.rollout.max_prompt_length, "response_tokens": config.max_response_length}
    for name, average in lengths.items():
        if average is not None and average > limits[name]:
            reason = f"{average:g} is above the longest that the config allows, {limits[name]}"
            raise ConfigError(f"{name}: {reason}; lower it, or raise the limit")


def planned_ranks(config: RunConfig, world_size: int | None, gpu: str | None) -> tuple[int, str]:
    """Return the trainer's ranks, and what was assumed without a `world_size`. With a kind of GPU these are the ranks
    that `megagrpo submit` would start on `run.nodes` nodes, if the layout divides them."""
    from megagrpo.cluster.launch.job import Cluster, place

    smallest = config.parallel.smallest_world
    if world_size or gpu is None:
        return world_size or smallest, ""
    other, nodes = "world_size=N plans for another number", Cluster.model_validate({})
    try:
        placed = place(config.run.nodes, config.rollout, nodes).world_size
    except ConfigError:
        placed = 0
    where = f"run.nodes {config.run.nodes} with {nodes.gpus_per_node} GPUs each"
    if placed and not config.parallel.world_problems(placed):
        return placed, f"{placed} rank(s), for {where}; {other}"
    return smallest, f"{smallest} rank(s), as few as the layout needs, because it does not fit {where}; {other}"
