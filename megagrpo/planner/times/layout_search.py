"""Finds the layouts of a run that fit a kind of GPU, fastest first. Tries every size of every axis and prunes early.

The GPUs are divided between trainer and dedicated servers too, and among colocated servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, gcd, inf

from megagrpo.config import ParallelSection, RolloutSection, RunConfig
from megagrpo.config.rules.config_rules import cross_field_problems
from megagrpo.config.sections.placement import placement_problems
from megagrpo.families.hf_config import HfConfig, model_problems, nearly_even
from megagrpo.planner.costs.engine_memory import GIB, ServerMemory
from megagrpo.planner.costs.gpu_specs import GPUS_PER_NODE, Gpu
from megagrpo.planner.costs.planned_memory import smallest_gpu, trainer_memory
from megagrpo.planner.costs.workload import Lengths
from megagrpo.planner.rules.plan_problems import expert_problems, fp8_problems, layout_problems
from megagrpo.planner.rules.vllm_problems import vllm_can_split
from megagrpo.planner.times.generation_times import Generation
from megagrpo.planner.times.step_times import StepTimes, step_times
from megagrpo.platform.process.terminal import wrapped

USABLE = 0.95  # share of a GPU's memory to fill; the rest covers memory that the plan does not count
USABLE_WITH_EXPERTS = 0.9  # the same with experts: some ranks get more tokens than others
TOKENS_PER_CONTEXT_RANK = 4096  # least tokens of the longest sample per cp rank: fewer are not worth the messages
MICRO_BATCHES = (1, 2, 4, 8)  # sizes to try, in longest samples
# share of the trainer's seconds added per stage when layouts are compared: micro-batches are never quite even
STAGE_COST = 0.01
TRAIN_COST = 0.2  # cost of a second that the trainer computes while servers generate, in seconds of a step
GPU_COST = 0.1  # twice the GPUs must shorten a step by 7 %
SPLITS = 5  # divisions of the GPUs whose layouts are searched
SPLIT_GAIN = 0.05  # share by which another division must be cheaper than the run's own
GENERATE_ERROR = 0.3  # relative error of the predicted seconds of generation (benchmarks/RESULTS.md)

_Server = tuple[dict[str, float], float]  # `ServerMemory.parts`, and GiB of the largest reloaded module


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory and times. `overrides` are the config keys that turn the run's config into it."""

    config: RunConfig
    overrides: tuple[str, ...]
    world_size: int  # ranks of the trainer
    gib: float  # memory that a GPU needs
    times: StepTimes
    cost: float  # `_cost` of them
    bound: str  # longest part of the step, and "(memory)" where more memory would shorten it


def _cost(times: StepTimes, cuts: float) -> float:
    """Return the mean seconds of a step, and a share of the trainer's seconds, so that of equal steps the one that
    trains faster is cheaper. A small share per cut is added to the trainer's seconds, so that simpler layouts win
    near ties. `cuts` are the stages, virtual ones too, and a quarter of tp."""
    slower = {phase: (1 + STAGE_COST * cuts) * times.seconds[phase] for phase in ("logprobs", "train")}
    times = replace(times, seconds=times.seconds | slower)
    return _mean_step(times) + TRAIN_COST * times.computing


def _mean_step(times: StepTimes) -> float:
    """Return the mean seconds of three steps: generation as predicted, faster and slower by `GENERATE_ERROR`. Without
    the control plane, whose seconds differ little between layouts."""
    factors = (1 - GENERATE_ERROR, 1.0, 1 + GENERATE_ERROR)
    generate = times.seconds["generate"]
    steps = [replace(times, seconds=times.seconds | {"generate": factor * generate}).step for factor in factors]
    return sum(steps) / len(steps) - times.seconds["control"]


def _split_cost(times: StepTimes) -> float:
    """Return the seconds of a step times a slowly growing function of its GPUs, so that fewer GPUs win near ties."""
    return _mean_step(times) * times.gpus**GPU_COST


def search(
    config: RunConfig, model: HfConfig, world_size: int, gpu: Gpu, lengths: Lengths, keep: int = 5
) -> list[Candidate]:
    """Return the `keep` fastest valid layouts that fit `gpu`, on at most the run's GPUs: `world_size` ranks and its
    servers.

    The split into ranks and servers is the run's own, or one whose step is shorter by `SPLIT_GAIN`. After the own
    split, the layouts of the split are searched on which the best layout so far is the cheapest, and so on. A split
    with fewer layouts than `keep` is followed by the best split before it.
    """
    finder, best, limit = _Search(config, model, gpu, lengths), list[Candidate](), inf
    splits = splits_of(config, model, world_size, finder.room)
    for number in range(SPLITS):
        if not splits:
            break
        split = splits.pop(0)
        found = finder.layouts(split, keep)
        if found and (cost := _split_cost(found[0].times)) < limit:
            best, found, limit = found, best, cost if number else cost * (1 - SPLIT_GAIN)
        best = [*best, *found][:keep]
        if best:
            costs = {id(one): finder.expected_cost(one, best[0]) for one in splits}
            splits = sorted((one for one in splits if costs[id(one)] < limit), key=lambda one: costs[id(one)])
        else:  # too few ranks hold the model, or no layout divides their number
            splits.sort(key=lambda one: -one.world_size)
    return best


class _Search:
    """A search of layouts of `own`, with other numbers of servers too."""

    def __init__(self, own: RunConfig, model: HfConfig, gpu: Gpu, lengths: Lengths):
        self.own, self.model, self.gpu, self.lengths = own, model, gpu, lengths
        self.room = (USABLE_WITH_EXPERTS if model.experts else USABLE) * gpu.memory_gib
        self._generate: dict[tuple[int, int], float] = {}  # (servers, tp) -> seconds

    def expected_cost(self, split: Split, best: Candidate) -> float:
        """Return `_split_cost` of the layout `best` on another split. If the layout does not divide the ranks, its
        seconds of training are taken to scale with them."""
        made, ranks = best.config.model_copy(update={"rollout": split.config.rollout}), split.world_size
        ranks = best.world_size if any(made.parallel.world_problems(ranks)) else ranks
        times = step_times(made, self.model, ranks, self.gpu, self.lengths, self.generate(split.config))
        scaled = {phase: ranks / split.world_size * times.seconds[phase] for phase in ("logprobs", "train")}
        gpus = times.gpus + split.world_size - ranks
        return _split_cost(replace(times, seconds=times.seconds | scaled, gpus=gpus))

    def generate(self, config: RunConfig) -> float:
        """Return the seconds of generation with this number and size of servers."""
        servers = config.rollout.servers, config.rollout.tp
        if servers not in self._generate:
            self._generate[servers] = Generation(config, self.model, self.gpu, self.lengths).seconds()
        return self._generate[servers]

    def layouts(self, split: Split, keep: int) -> list[Candidate]:
        """Return the `keep` cheapest layouts of a split that fit."""
        best: list[Candidate] = []
        config, model = split.config, self.model
        memory = ServerMemory.of(config, model)  # the same for every trainer's layout
        server = memory.parts(), memory.reload_bytes() / GIB
        for parallel in _layouts(config, model, split.world_size):
            leanest = _changed(config, parallel, 1, "full")
            if self._gib(leanest, split.world_size, server) > self.room:
                continue
            for virtual in _virtual(model, parallel):
                limit = best[-1].cost if len(best) == keep else inf
                if (found := self._fastest(split, virtual, server, limit)) is not None:
                    best = sorted([*best, found], key=lambda one: one.cost)[:keep]
        return best

    def _fastest(self, split: Split, parallel: ParallelSection, server: _Server, limit: float) -> Candidate | None:
        """Return the micro-batch size and recompute with which a layout is cheapest and fits; None if none does below
        the cost `limit`."""
        choices = product(MICRO_BATCHES, ("none", "selective", "full"))
        made = [_changed(split.config, parallel, samples, recompute) for samples, recompute in choices]
        world_size, generate = split.world_size, self.generate(split.config)
        cuts = parallel.pp * parallel.vpp + parallel.tp / 4
        timed = [step_times(one, self.model, world_size, self.gpu, self.lengths, generate) for one in made]
        costs, limited = [_cost(times, cuts) for times in timed], False
        for i in sorted(range(len(made)), key=costs.__getitem__):
            if costs[i] >= limit:
                return None
            if (gib := self._gib(made[i], world_size, server)) > self.room:
                limited = True
            elif not cross_field_problems(made[i]) and not any(layout_problems(made[i], world_size)):
                bound = self._bound(split.config, timed[i], limited)
                overrides = _overrides(made[i], self.own)
                return Candidate(made[i], overrides, world_size, gib, timed[i], costs[i], bound)
        return None

    def _bound(self, config: RunConfig, times: StepTimes, limited: bool) -> str:
        """Return the longest part of a step, and "(memory)" where it would be shorter with more memory. `limited`: a
        faster choice for the trainer does not fit."""
        if times.bound == "generation":
            limited = Generation(config, self.model, self.gpu, self.lengths).is_cache_full()
        return times.bound + " (memory)" * (limited and times.bound in ("generation", "training"))

    def _gib(self, config: RunConfig, world_size: int, server: _Server) -> float:
        memory = trainer_memory(config, self.model, world_size // config.parallel.model_parallel_size)
        return smallest_gpu(config, memory, *server)


def _layouts(config: RunConfig, model: HfConfig, world_size: int) -> Iterator[ParallelSection]:
    """Yield the layouts of the ranks into which the model can be sharded, without virtual stages.

    A tp beyond the KV heads, where each layer gathers queries, keys and values, is tried only if the config has one.
    """
    longest, largest_tp = config.max_model_len, max(model.num_kv_heads, config.parallel.tp)
    stages = [pp for pp in range(1, min(world_size, model.num_layers) + 1) if world_size % pp == 0]
    for tp, pp, cp in product(_powers(GPUS_PER_NODE), stages, _powers(max(1, longest // TOKENS_PER_CONTEXT_RANK))):
        if tp > largest_tp or world_size % (tp * pp * cp):
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


def _overrides(config: RunConfig, own: RunConfig) -> tuple[str, ...]:
    """Return the keys that turn config `own` into this config, and its layout sizes above 1."""
    p, before = config.parallel, own.parallel
    servers = [
        f"rollout.{name}={size}"
        for name in ("servers", "tp")
        if (size := getattr(config.rollout, name)) != getattr(own.rollout, name)
    ]
    overrides = servers + [
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


def search_table(candidates: Sequence[Candidate]) -> Sequence[str]:
    """Return the layouts, fastest first: sizes, what bounds the step, and the config overrides."""
    lines = [
        "fastest layouts that fit; of nearly equal ones the layout with fewer cuts first",
        f"{'step s':>9}{'train s':>9}{'GiB':>7}{'ranks':>8}{'GPUs':>8}{'idle':>6}  bound by; overrides",
    ]
    for one in candidates:
        t = one.times
        sizes = f"{t.step:9.1f}{t.seconds['train']:9.1f}{one.gib:7.1f}{one.world_size:8,}{t.gpus:8,}{t.idle:6.0%}"
        lines += [f"{sizes}  {one.bound}", *wrapped(f"{'':<10}{' '.join(one.overrides)}", indent=0)]
    return lines


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
