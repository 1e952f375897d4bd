"""Predicts the seconds of each phase of a step on a kind of GPU.

Efficiencies are named constants, not measured by us. benchmarks/RESULTS.md compares predictions with published
steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, log2

from megagrpo.config import RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.flops import model_flops
from megagrpo.planner.costs.gpu_specs import GPUS_PER_NODE, HOST_GB_PER_S, Gpu, Links
from megagrpo.planner.costs.planned_memory import copied_bytes
from megagrpo.planner.costs.shapes import (
    expert_parameters,
    layer_route_bytes,
    num_parameters,
    stage_experts,
    stage_parameters,
)
from megagrpo.planner.costs.tower_costs import tower_seconds
from megagrpo.planner.costs.workload import Lengths, average_bundle, step_samples
from megagrpo.planner.times.generation_times import Generation
from megagrpo.planner.times.pass_times import fill, pass_seconds

STORAGE_GB_PER_S = 2.0  # rate at which one node reads weights


@dataclass(frozen=True)
class StepTimes:
    """`seconds` is phase -> seconds; load happens once, the others in each step. `control` and `sync` are the parts of
    these phases that `control_seconds` and `sync_parts` predict. `overlap` has the seconds of messages that each
    overlap hides, or would hide if `train.overlap` had it.

    `mfu` is the train phase's, on the trainer's GPUs; as in the metric, FLOPs of a shared prompt count once. `idle` is
    the share of all GPUs' time per step spent waiting: in a pipeline bubble, for the other side, or without a server.
    """

    seconds: dict[str, float]
    gpus: int
    tokens: float  # tokens of all samples of a step
    mfu: float
    idle: float
    bubble: float  # idle share of the train phase
    ahead: bool = False  # asynchronous: generation overlaps with training
    control: dict[str, float] = field(default_factory=dict)
    sync: dict[str, float] = field(default_factory=dict)
    overlap: dict[str, float] = field(default_factory=dict)

    @property
    def computing(self) -> float:
        return self.seconds["logprobs"] + self.seconds["train"]

    @property
    def step(self) -> float:
        generate = self.seconds["generate"]
        both = max(generate, self.computing) if self.ahead else generate + self.computing
        return both + self.seconds["sync"] + self.seconds["control"]

    @property
    def bound(self) -> str:
        """The longest part of a step: generation, training, weight sync or control plane."""
        of_phases = {"generate": "generation", "sync": "weight sync", "control": "control plane"}
        parts = {name: self.seconds[phase] for phase, name in of_phases.items()} | {"training": self.computing}
        return max(parts, key=parts.__getitem__)

    @property
    def tokens_per_gpu(self) -> float:
        """Sample tokens, prompts included, per second of a step and GPU."""
        return self.tokens / self.step / self.gpus


def step_times(
    config: RunConfig, model: HfConfig, world_size: int, gpu: Gpu, lengths: Lengths, generate: float | None = None
) -> StepTimes:
    """Predict a step of a layout that fits the model and `world_size` ranks. `generate` gives the generation seconds if
    already known."""
    a, samples = config.algorithm, step_samples(config)
    passes = pass_seconds(config, model, world_size, gpu, lengths)
    forward, backward, fraction = passes.forward, passes.backward, passes.bubble
    logprob_passes = int(a.updates_per_step > 1 or a.kl_in_reward) + int(a.has_reference)
    overlap = {name: a.num_iterations * seconds for name, seconds in passes.gains.items()}
    if "param_gather" in overlap:  # not of the last update, whose weights the weight sync needs
        gather = sum(_gather_seconds(config, model, world_size, gpu))
        overlap["param_gather"] = (a.updates_per_step - 1) * min(gather, passes.first)
    updates = a.updates_per_step * _update_seconds(config, model, world_size, gpu)
    updates -= overlap["param_gather"] if "param_gather" in config.train.overlap else 0.0
    train = a.num_iterations * (forward + backward + (forward if a.router_aux_loss_coef else 0)) + updates
    # rows of a frozen tower are kept for the step; a backward pass takes as long as two forward passes
    tower_passes = 3 * a.num_iterations + logprob_passes if config.towers == "trained" else 1
    replicas = world_size // config.parallel.model_parallel_size
    train += tower_passes * tower_seconds(config, model, gpu, lengths, replicas)
    control = control_seconds(config, world_size, lengths, route_bytes(config, model))
    sync = sync_parts(config, model, world_size, gpu)
    generate = Generation(config, model, gpu, lengths).seconds() if generate is None else generate
    beside = min(control["read"], generate)  # responses are read while others are generated
    seconds = {
        "load": _load_seconds(config, model, world_size),
        "generate": generate,
        "logprobs": logprob_passes * forward,
        "train": train,
        "sync": sync_seconds(sync),
        "control": sum(control.values()) - beside,
    }
    together = average_bundle(config, lengths).responses
    of_sample = model_flops(model, lengths.prompt, lengths.response, config.lora.enabled, together)
    mfu = a.num_iterations * samples * of_sample / (train * world_size * gpu.bf16_tflops * 1e12)
    generating = config.rollout.server_gpus
    servers = 0 if config.rollout.placed == "colocated" else generating
    ahead, tokens = config.rollout.max_staleness > 0, samples * lengths.sample
    made = StepTimes(seconds, world_size + servers, tokens, mfu, 0.0, fraction, ahead, control, sync, overlap)
    waits = (fraction * (made.computing - updates) + seconds["control"]) * world_size
    if servers:
        both = made.step - seconds["sync"]
        waits += (both - seconds["control"] - made.computing) * world_size + (both - generate) * servers
    else:
        waits += generate * max(0, world_size - generating)
    return replace(made, idle=waits / (made.step * made.gpus))


def _copies(config: RunConfig, model: HfConfig, world_size: int) -> tuple[tuple[float, int, int], ...]:
    """Return the parameters of the fullest rank, outside experts and of experts, with the number of ranks that hold the
    same ones and the distance between these ranks."""
    p = config.parallel
    copies = world_size // p.model_parallel_size * p.cp
    expert_copies = max(1, copies * p.tp // (p.ep * p.expert_tp))
    outside, experts = max(stage_parameters(model, p)), max(stage_experts(model, p))
    return (outside, copies, p.tp), (experts, expert_copies, p.ep * p.expert_tp)


def _gather_seconds(config: RunConfig, model: HfConfig, world_size: int, gpu: Gpu) -> list[float]:
    """Return the seconds to all-gather weights after an optimizer step, outside experts and of experts."""
    size, links = config.model.weight_bytes, Links(gpu)
    return [
        links.reduce_scatter(count * size, *ranks)
        for count, *ranks in _copies(config, model, world_size)
        if not config.lora.enabled
    ]


def _update_seconds(config: RunConfig, model: HfConfig, world_size: int, gpu: Gpu) -> float:
    """Return seconds of an optimizer step: reduce float32 gradients, read and write its state, all-gather weights."""
    if config.lora.enabled:
        return 0.05 * max(stage_parameters(model, config.parallel)) * 4 / (gpu.memory_gb_per_s * 1e9)
    links, groups = Links(gpu), _copies(config, model, world_size)
    size = 4 + config.model.weight_bytes
    messages = sum(links.reduce_scatter(count * size, *ranks) for count, *ranks in groups)
    own = sum(count / (copies if config.train.distributed_optimizer else 1) for count, copies, _ in groups)
    moved = own * 2 * (8 + 4) / (gpu.memory_gb_per_s * 1e9)
    if config.train.optimizer_offload:
        moved += own * 2 * 8 / (HOST_GB_PER_S * 1e9)
    return messages + moved


def sync_seconds(parts: dict[str, float]) -> float:
    """Return the seconds of a weight sync from its `sync_parts`: of its busiest end, plus the copies."""
    return max(parts["senders"], parts["receivers"]) + parts["copies"]


def sync_parts(config: RunConfig, model: HfConfig, world_size: int, gpu: Gpu) -> dict[str, float]:
    """Return the seconds of the `senders` and of the `receivers` of a weight sync, which overlap, and of the `copies`
    of `train.offload` to the host and back.

    A rank sends its part of the weights to all servers; a worker receives its part of the model.
    `benchmarks/scaling/sync_size.py` computes both exactly.
    """
    r = config.rollout
    size = num_parameters(model) * config.model.weight_bytes
    experts = expert_parameters(model) * config.model.weight_bytes
    received = (size - experts + experts / r.dp) / (r.tp * r.pp)
    sent = received * config.rollout.server_gpus / world_size
    links, span = Links(gpu), 1 if r.placed == "colocated" else 10**9
    copied = max(copied_bytes(config, model, world_size)) if config.takes_turns else 0
    ends = {"senders": links.seconds(sent, span), "receivers": links.seconds(received, span)}
    return ends | {"copies": copied / (HOST_GB_PER_S * 1e9)}


def _load_seconds(config: RunConfig, model: HfConfig, world_size: int) -> float:
    """Return the seconds for each node to read its ranks' weights."""
    p = config.parallel
    stage_bytes = max(o + e for o, e in zip(stage_parameters(model, p), stage_experts(model, p), strict=True)) * 2
    return stage_bytes * min(world_size, GPUS_PER_NODE) / (STORAGE_GB_PER_S * 1e9)


# Seconds of one core, and of gloo between two hosts. `python benchmarks/scale.py --parts planned` prints predictions
# beside measured ones.
REQUEST_SECONDS, READ_TOKEN_SECONDS = 0.45e-3, 0.6e-6  # a leader reads a response
PLANNED_SAMPLE_SECONDS = 5e-6  # every rank: advantages, packing and metrics of all samples
BUILT_SECONDS = 0.25e-3  # a micro-batch of a rank's own samples
BUILT_SAMPLE_SECONDS, BUILT_TOKEN_SECONDS = 20e-6, 30e-9  # what is in it
WRITTEN_SAMPLE_SECONDS, WRITTEN_TOKEN_SECONDS = 17e-6, 40e-9  # the line of a response, one after the other
READ_ROUTE_SECONDS = 8e-9  # of a byte of routes that a leader decodes and checks
ROUTED_TOKEN_SECONDS, ROUTED_SECONDS = 150e-9, 5e-9  # of a token, and of a byte of its routes, that a leader sends on
GLOO_SECONDS = 50e-6  # of a small message between two hosts over gloo
GLOO_GB_PER_S = 1.0  # of a large one
AGREEMENTS = 16  # small all-reduces over all ranks in a step
FACT_BYTES = 40  # of a sample that every rank knows


def route_bytes(config: RunConfig, model: HfConfig) -> int:
    """Return the bytes of a token's routes in all layers, with `rollout.routing_replay: engine`."""
    if model.experts is None or config.rollout.routing_replay != "engine":
        return 0
    return len(model.experts.blocks) * layer_route_bytes(model)


def control_seconds(config: RunConfig, world_size: int, lengths: Lengths, routes: int = 0) -> dict[str, float]:
    """Return part -> seconds of a step: `read` on the leader of a replica, beside generation, and in turn `facts` and
    `tokens` (their exchange), `pack`, `agree`, `write`, and with `routes` bytes of routes a token their exchange.

    Facts go around the leaders, tokens from leader to leader, and both then from the leader to the ranks of its
    replica, tokens only to the first and the last pipeline stage. Routes go from leader to leader as tokens do. A rank
    then gets only those of its own tokens and layers.
    """
    p, samples = config.parallel, step_samples(config)
    dp = max(1, world_size // p.model_parallel_size)
    own = samples / dp
    computed = own * average_bundle(config, lengths).tokens_per_response
    micro_batches = ceil(computed / (config.train.max_tokens_per_micro_batch * fill(config, lengths)))
    built = own * (BUILT_SAMPLE_SECONDS + BUILT_TOKEN_SECONDS * lengths.sample)
    facts, row = samples * FACT_BYTES, 4 * (lengths.sample + lengths.response)
    seconds = {
        "read": own * (REQUEST_SECONDS + READ_TOKEN_SECONDS * lengths.response),
        "facts": _seconds(dp - 1, facts) + _broadcast(p.model_parallel_size, facts),
        "tokens": _seconds(dp - 1, own * row) + _broadcast(p.tp * p.cp * min(2, p.pp), own * row),
        "pack": samples * PLANNED_SAMPLE_SECONDS + micro_batches * BUILT_SECONDS + built,
        "agree": AGREEMENTS * _seconds(ceil(log2(world_size)), 0),
        "write": samples * (WRITTEN_SAMPLE_SECONDS + WRITTEN_TOKEN_SECONDS * lengths.response),
    }
    if routes:
        tokens, ranks = own * lengths.sample, p.model_parallel_size
        copies = 1 if p.sequence_parallel else p.tp
        seconds["read"] += tokens * routes * READ_ROUTE_SECONDS
        seconds["routes"] = tokens * (ROUTED_TOKEN_SECONDS + ROUTED_SECONDS * routes) + _seconds(
            dp - 1, tokens * routes
        )
        seconds["routes"] += _seconds(ranks - 1, copies * tokens * routes * (ranks - 1) / ranks)
    return seconds


def _seconds(messages: int, size: float) -> float:
    """Return the seconds of messages one after the other, of `size` bytes together."""
    return messages * GLOO_SECONDS + (size / (GLOO_GB_PER_S * 1e9) if messages else 0.0)


def _broadcast(ranks: int, size: float) -> float:
    """Return the seconds of a broadcast along a binary tree, which sends everything in each of its rounds."""
    rounds = ceil(log2(ranks))
    return _seconds(rounds, rounds * size)
