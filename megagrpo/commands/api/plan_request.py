"""`megagrpo.plan`, and the request that it shares with `megagrpo plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megagrpo.commands.api.inputs.config_input import ConfigLike, Overrides, Settings, read
from megagrpo.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from megagrpo.planner import Plan


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for: the arguments of `megagrpo.plan`."""

    world_size: int | None = None
    gpu: str | None = None
    gpu_memory_gb: float | None = None
    search: bool = False
    prompt_tokens: float | None = None
    response_tokens: float | None = None

    def check(self) -> None:
        """Raise ConfigError for a value that is out of its range or that nothing reads."""
        from megagrpo.planner.costs.gpu_specs import GPUS

        for name in ("world_size", "gpu_memory_gb", "prompt_tokens", "response_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}: must be a positive number (got {value!r})")
        kinds = ", ".join(GPUS)
        if self.gpu is not None and self.gpu not in GPUS:
            raise ConfigError(f"gpu: {self.gpu} is not known; choose one of {kinds}")
        timed = next((name for name in ("search", "prompt_tokens", "response_tokens") if getattr(self, name)), None)
        if self.gpu is None and timed is not None:
            raise ConfigError(f"{timed}: predicted seconds need a kind of GPU; add gpu (--gpu), one of {kinds}")


def plan(
    config: ConfigLike,
    *,
    world_size: int | None = None,
    gpu: str | None = None,
    gpu_memory_gb: float | None = None,
    search: bool = False,
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
        search: With `gpu`, also find the fastest layouts.
        prompt_tokens: With `gpu`, average length of a prompt.
        response_tokens: With `gpu`, average length of a response.
        overrides: Values by dotted key, or texts as on the command line.

    Returns:
        The plan. `str(plan)` is what `megagrpo plan` prints. `problems` is empty when the run can start; `memory` is
        phase -> part -> GiB; `times` holds seconds, with `gpu`; `found` the layouts of `search`.

    Raises:
        ConfigError: The config or an argument is wrong. A layout that does not fit is no error: `problems` names it.
    """
    request = PlanRequest(world_size, gpu, gpu_memory_gb, search, prompt_tokens, response_tokens)
    return make_plan(read(config, overrides), request)


def planned_ranks(config: RunConfig, request: PlanRequest) -> tuple[int, str]:
    """Return the trainer's ranks, and what was assumed if the request does not name them. With a kind of GPU these are
    the ranks that `megagrpo submit` would start on `run.nodes` nodes, if the layout divides them."""
    from megagrpo.cluster.launch.job import Cluster, place

    smallest = config.parallel.smallest_world
    if request.world_size or request.gpu is None:
        return request.world_size or smallest, ""
    other, nodes = "world_size=N plans for another number", Cluster.model_validate({})
    try:
        placed = place(config.run.nodes, config.rollout, nodes).world_size
    except ConfigError:
        placed = 0
    where = f"run.nodes {config.run.nodes} with {nodes.gpus_per_node} GPUs each"
    if placed and not config.parallel.world_problems(placed):
        return placed, f"{placed} rank(s), for {where}; {other}"
    return smallest, f"{smallest} rank(s), as few as the layout needs, because it does not fit {where}; {other}"


def make_plan(settings: Settings, request: PlanRequest) -> Plan:
    """Return the plan of a config. Raises ConfigError for a wrong config or request."""
    from megagrpo import planner
    from megagrpo.planner.costs.gpu_specs import GPUS
    from megagrpo.planner.costs.workload import expected_lengths

    request.check()
    config, kind = settings.validated(), None if request.gpu is None else GPUS[request.gpu]
    if not config.algorithm.loss.generates and request.gpu:
        reason = f"loss_type {config.algorithm.loss_type} samples nothing, and its seconds are not predicted"
        raise ConfigError(f"gpu: {reason}; set gpu_memory_gb alone")
    for name, limit in (
        ("prompt_tokens", config.rollout.max_prompt_length),
        ("response_tokens", config.max_response_length),
    ):
        average = getattr(request, name)
        if average is not None and average > limit:
            reason = f"{average:g} is above the longest that the config allows, {limit}"
            raise ConfigError(f"{name}: {reason}; lower it, or raise the limit")
    ranks, assumed = planned_ranks(config, request)
    made = planner.plan(config, ranks, request.gpu_memory_gb or (None if kind is None else kind.memory_gib))
    made.rows.extend([("assumed", assumed)] if assumed else [])
    lengths = expected_lengths(config, request.prompt_tokens, request.response_tokens)
    if kind is not None:
        made = planner.with_times(made, config, ranks, kind, lengths, request.search)
    return made
