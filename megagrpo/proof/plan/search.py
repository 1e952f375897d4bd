"""Finds the layouts of a run that fit a kind of GPU, fastest first. Tries every size of every axis and prunes early."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from megagrpo.config import ParallelSection, RunConfig
from megagrpo.config.config_rules import cross_field_problems
from megagrpo.models.families.hf_config import HfConfig, model_problems, nearly_even
from megagrpo.proof.plan.engine_memory import GIB, engine_memory, reload_bytes
from megagrpo.proof.plan.gpu_specs import GPUS_PER_NODE, Gpu
from megagrpo.proof.plan.plan_problems import expert_problems, fp8_problems, layout_problems
from megagrpo.proof.plan.planned_memory import smallest_gpu, trainer_memory
from megagrpo.proof.plan.times import StepTimes, generate_seconds, step_times
from megagrpo.proof.plan.workload import Lengths

USABLE = 0.95  # share of a GPU's memory to fill; the rest covers memory that the plan does not count
USABLE_WITH_EXPERTS = 0.9  # the same with experts: some ranks get more tokens than others
TOKENS_PER_CONTEXT_RANK = 4096  # least tokens of the longest sample per cp rank: fewer are not worth the messages
MICRO_BATCHES = (1, 2, 4, 8)  # sizes to try, in longest samples
# share of the trainer's seconds added per stage when layouts are compared: micro-batches are never quite even
STAGE_COST = 0.01
GENERATE_ERROR = 0.3  # relative error of the predicted seconds of generation (docs/plan.md, published steps)


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory and times. `overrides` are the config keys that turn the run's config into it."""

    overrides: tuple[str, ...]
    gib: float  # memory that a GPU needs
    times: StepTimes
    stages: int  # pipeline stages, virtual ones included
    cost: float  # `_cost` of them


def _cost(times: StepTimes, stages: int) -> float:
    """Return the seconds of a step, plus a small share of the trainer's per stage, so that simpler layouts win near
    ties. `stages` includes virtual ones.

    Generation may be faster or slower than predicted by `GENERATE_ERROR`, so a step is the mean of three. Where servers
    are slower than the trainer, the layout that trains faster is cheaper.
    """
    factors = (1 - GENERATE_ERROR, 1.0, 1 + GENERATE_ERROR)
    generate = times.seconds["generate"]
    steps = [replace(times, seconds=times.seconds | {"generate": factor * generate}).step for factor in factors]
    return sum(steps) / len(steps) + STAGE_COST * stages * times.computing


def search(
    config: RunConfig, model: HfConfig, world_size: int, gpu: Gpu, lengths: Lengths, keep: int = 5
) -> list[Candidate]:
    """Return the `keep` fastest valid layouts of `world_size` ranks that fit `gpu`, with the rollout as configured."""
    best: list[Candidate] = []
    room = (USABLE_WITH_EXPERTS if model.experts else USABLE) * gpu.memory_gib
    generate = generate_seconds(config, model, gpu, lengths)
    server = engine_memory(config, model), reload_bytes(config, model) / GIB  # the same in every layout of the trainer
    for parallel in _layouts(config, model, world_size):
        dp = world_size // parallel.model_parallel_size
        leanest = _changed(config, parallel, 1, "full")
        if _gib(leanest, model, dp, *server) > room:
            continue
        for virtual in _virtual(model, parallel):
            for times, made in _by_speed(config, model, world_size, gpu, lengths, generate, virtual):
                stages = virtual.pp * virtual.vpp
                cost = _cost(times, stages)
                if len(best) == keep and cost >= best[-1].cost:
                    break
                gib = _gib(made, model, dp, *server)
                if gib <= room and not cross_field_problems(made) and not any(layout_problems(made, world_size)):
                    best.append(Candidate(_overrides(made, config), gib, times, stages, cost))
                    best = sorted(best, key=lambda one: one.cost)[:keep]
                    break
    return best


def _by_speed(
    config: RunConfig,
    model: HfConfig,
    world_size: int,
    gpu: Gpu,
    lengths: Lengths,
    generate: float,
    parallel: ParallelSection,
) -> list[tuple[StepTimes, RunConfig]]:
    """Return a layout with every micro-batch size and kind of recompute, fastest first."""
    choices = product(MICRO_BATCHES, ("none", "selective", "full"))
    made = [_changed(config, parallel, samples, recompute) for samples, recompute in choices]
    timed = [(step_times(one, model, world_size, gpu, lengths, generate), one) for one in made]
    return sorted(timed, key=lambda pair: _cost(pair[0], parallel.pp * parallel.vpp))


def _layouts(config: RunConfig, model: HfConfig, world_size: int) -> Iterator[ParallelSection]:
    """Yield the layouts of the ranks into which the model can be sharded, without virtual stages."""
    longest = config.max_model_len
    stages = [pp for pp in range(1, min(world_size, model.num_layers) + 1) if world_size % pp == 0]
    for tp, pp, cp in product(_powers(GPUS_PER_NODE), stages, _powers(max(1, longest // TOKENS_PER_CONTEXT_RANK))):
        if world_size % (tp * pp * cp):
            continue
        experts: list[tuple[int, int | None]] = [(1, None)]
        if model.experts:
            each = {(ep, etp) for ep in _powers(model.experts.count) for etp in {1, tp}}
            experts = sorted((ep, etp) for ep, etp in each if world_size % (ep * etp * pp) == 0)
        for ep, etp in experts:
            sizes = {"tp": tp, "pp": pp, "vpp": 1, "cp": cp, "ep": ep, "etp": etp, "sequence_parallel": tp > 1}
            made = _staged(model, config.parallel.model_copy(update=sizes))
            cut = config.model_copy(update={"parallel": made})
            odd = (*model_problems(model, made), *expert_problems(cut, model), *fp8_problems(cut, model))
            if not odd:
                yield made


def _virtual(model: HfConfig, parallel: ParallelSection) -> list[ParallelSection]:
    """Return the layout with every number of virtual stages, 1 included."""
    if parallel.pp == 1:
        return [parallel]
    counts = [vpp for vpp in (1, 2, 4) if parallel.pp * vpp <= model.num_layers]
    return [_staged(model, parallel.model_copy(update={"vpp": vpp})) for vpp in counts]


def _staged(model: HfConfig, parallel: ParallelSection) -> ParallelSection:
    """Return the layout with its layers spread over the stages; `pipeline_layers` is set if they divide unevenly."""
    stages = parallel.pp * parallel.vpp
    layers = None if model.num_layers % stages == 0 else nearly_even(model.num_layers, stages)
    return parallel.model_copy(update={"pipeline_layers": layers})


def _powers(largest: int) -> list[int]:
    return [2**i for i in range(largest.bit_length())]


def _changed(config: RunConfig, parallel: ParallelSection, samples: int, recompute: str) -> RunConfig:
    align = parallel.micro_batch_align(config.model.token_align)
    budget = ceil(samples * config.max_model_len / align) * align
    train = config.train.model_copy(update={"max_tokens_per_micro_batch": budget})
    model = config.model.model_copy(update={"recompute": recompute})
    return config.model_copy(update={"parallel": parallel, "train": train, "model": model})


def _gib(config: RunConfig, model: HfConfig, dp: int, engine: dict[str, float], reload: float) -> float:
    return smallest_gpu(config, trainer_memory(config, model, dp), engine, reload)


def _overrides(config: RunConfig, own: RunConfig) -> tuple[str, ...]:
    """Return the keys that turn config `own` into this config, and its layout sizes above 1."""
    p, before = config.parallel, own.parallel
    overrides = [
        f"parallel.{name}={getattr(p, name)}"
        for name in ("tp", "pp", "vpp", "cp", "ep")
        if max(getattr(p, name), getattr(before, name)) > 1
    ]
    overrides += [f"parallel.etp={p.expert_tp}"] if p.expert_tp != p.tp or before.etp else []
    if p.sequence_parallel or before.sequence_parallel:
        overrides.append(f"parallel.sequence_parallel={str(p.sequence_parallel).lower()}")
    layers = str(p.pipeline_layers or "null").replace(" ", "")
    overrides += [f"parallel.pipeline_layers={layers}"] if p.pipeline_layers or before.pipeline_layers else []
    overrides.append(f"train.max_tokens_per_micro_batch={config.train.max_tokens_per_micro_batch}")
    return (*overrides, f"model.recompute={config.model.recompute}")
