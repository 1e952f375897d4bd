"""Predicts the seconds of each phase of a step on a kind of GPU. The formulas are in docs/plan_model.md.

Efficiencies are named constants, not measured by us. benchmarks/RESULTS.md compares predictions with published
steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, exp

from megagrpo.config import RolloutSection, RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.engine_memory import GIB, block_bytes, device_bytes, engine_bytes, kv_bytes
from megagrpo.planner.costs.flops import attention_flops, model_flops, token_flops
from megagrpo.planner.costs.gpu_specs import GPUS_PER_NODE, HOST_GB_PER_S, Gpu, Links
from megagrpo.planner.costs.planned_memory import copied_bytes
from megagrpo.planner.costs.shapes import expert_parameters, num_parameters, stage_experts, stage_parameters
from megagrpo.planner.costs.tower_costs import tower_seconds
from megagrpo.planner.costs.workload import Lengths, average_bundle
from megagrpo.planner.times.control_plane import control_seconds
from megagrpo.planner.times.pass_times import pass_seconds
from megagrpo.planner.times.step_memory import route_bytes

PREFILL_EFFICIENCY = 0.5
DECODE_BANDWIDTH = 0.7  # share of the peak memory bandwidth when decoding
EXPERT_DECODE_BANDWIDTH = 0.5  # the same when it reads many narrow experts for a few tokens each
DECODE_STEP_SECONDS = 4e-3  # vLLM's overhead per decoding step: scheduling, sampling
LAYER_SECONDS = 20e-6  # kernel launches per layer of a decoding step
SLEEP_SECONDS = 3.0  # a colocated server's sleep and wake-up together
STORAGE_GB_PER_S = 2.0  # rate at which one node reads weights
CURVE_POINTS = 64


@dataclass(frozen=True)
class StepTimes:
    """`seconds` is phase -> seconds; load happens once, the others in each step. `control` and `sync` are the parts of
    these phases that `control_seconds` and `sync_parts` predict. `overlap` has the seconds of messages that each
    overlap hides, or would hide if `train.overlap` had it.

    `mfu` is the train phase's, on the trainer's GPUs; as in the metric, FLOPs of a shared prompt count once. `idle` is
    the share of all GPUs' time per step spent waiting, for the other side or in a pipeline bubble.
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


def server_gpus(rollout: RolloutSection) -> int:
    """Return the number of GPUs that generate."""
    return (len(rollout.urls) or rollout.servers) * rollout.devices_per_server


def step_times(
    config: RunConfig, model: HfConfig, world_size: int, gpu: Gpu, lengths: Lengths, generate: float | None = None
) -> StepTimes:
    """Predict a step of a layout that fits the model and `world_size` ranks. `generate` gives the generation seconds if
    already known."""
    a, samples = config.algorithm, config.rollout.prompts_per_step * config.rollout.num_generations
    passes = pass_seconds(config, model, world_size, gpu, lengths)
    forward, backward, fraction = passes.forward, passes.backward, passes.bubble
    logprob_passes = int(a.updates_per_step > 1 or a.kl_in_reward) + int(a.beta > 0)
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
    generate = generate_seconds(config, model, gpu, lengths) if generate is None else generate
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
    servers = 0 if config.rollout.placed == "colocated" else server_gpus(config.rollout)
    ahead, tokens = config.rollout.max_staleness > 0, samples * lengths.sample
    made = StepTimes(seconds, world_size + servers, tokens, mfu, 0.0, fraction, ahead, control, sync, overlap)
    waits = (fraction * (made.computing - updates) + seconds["control"]) * world_size
    if servers:
        both = made.step - seconds["sync"]
        waits += (both - seconds["control"] - made.computing) * world_size + (both - generate) * servers
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


def generate_seconds(config: RunConfig, model: HfConfig, gpu: Gpu, lengths: Lengths) -> float:
    """Return the seconds to generate a step's responses: prefill by FLOPs, decoding by reads of weights and cache."""
    r = config.rollout
    servers = len(r.urls) or r.servers
    each = ceil(r.prompts_per_step * r.num_generations / servers)
    prompts = ceil(each / r.num_generations)  # the responses of a group share their prompt's cache
    flops, peak = token_flops(model), gpu.bf16_tflops * 1e12 * r.devices_per_server
    of_prompt = lengths.prompt * flops.blocks + attention_flops(model, lengths.prompt)
    prefill = prompts * of_prompt / (peak * PREFILL_EFFICIENCY) + tower_seconds(config, model, gpu, lengths, servers)
    slots = _slots(config, model, gpu, lengths)
    if r.max_staleness and r.in_flight != "wait":
        return prefill + _steady_seconds(config, model, gpu, lengths, each, min(slots, each * (1 + r.max_staleness)))
    sleep = SLEEP_SECONDS if r.placed == "colocated" else 0
    return prefill + _drained_seconds(config, model, gpu, lengths, each, min(slots, each)) + sleep


def _drained_seconds(config: RunConfig, model: HfConfig, gpu: Gpu, lengths: Lengths, each: int, slots: int) -> float:
    """Return a server's decoding seconds until its `each` responses, and the other servers' responses, have ended.

    `slots` sequences decode at once, always while requests wait. Then the number falls with the length distribution.
    """
    queued = (each - slots) * lengths.response / slots  # steps in which every slot is busy
    total = queued * _decode_seconds(config, model, gpu, slots, lengths.prompt + lengths.response / 2)
    scale = exponential_mean(lengths.response, lengths.longest)
    width = lengths.longest / CURVE_POINTS
    for i in range(CURVE_POINTS):
        position = (i + 0.5) * width
        left = exp(-position / scale) if scale else 1.0  # share of responses that are longer than `position`
        # probability that any still runs
        going = 1 - (1 - left) ** (config.rollout.prompts_per_step * config.rollout.num_generations)
        total += width * going * _decode_seconds(config, model, gpu, max(1.0, slots * left), lengths.prompt + position)
    return total


def _steady_seconds(config: RunConfig, model: HfConfig, gpu: Gpu, lengths: Lengths, each: int, slots: int) -> float:
    """Return a server's decoding seconds if the next steps' responses fill free slots, so every slot is always busy.

    The longest response may take as many steps as it may be stale.
    """
    one = _decode_seconds(config, model, gpu, slots, lengths.prompt + lengths.response / 2)
    return max(each * lengths.response / slots, lengths.longest / (1 + config.rollout.max_staleness)) * one


def exponential_mean(mean: float, longest: float) -> float:
    """Return the scale of the exponential distribution that has this mean when truncated at `longest`.

    The share of responses running after some tokens falls like exp(-tokens / scale). 0 means all have full length.
    """
    if mean >= 0.999 * longest:
        return 0.0
    low, high = mean, 1000 * longest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * (1 - exp(-longest / middle)) < mean else (low, middle)
    return high


def _slots(config: RunConfig, model: HfConfig, gpu: Gpu, lengths: Lengths) -> int:
    """Return how many average sequences a server decodes at once: `rollout.max_num_seqs` on each data-parallel copy, or
    as many as its KV cache holds, at least one."""
    r = config.rollout
    room = r.gpu_memory_utilization * gpu.memory_gib * GIB - device_bytes(config, model)
    cached = max(1, int(room / max(1, kv_bytes(config, model, int(lengths.sample)))))
    return r.dp * min(r.max_num_seqs, cached)


def cache_limits(config: RunConfig, model: HfConfig, gpu: Gpu, lengths: Lengths) -> bool:
    """Whether responses wait because the KV cache of a server is full."""
    r = config.rollout
    each = ceil(r.prompts_per_step * r.num_generations / (len(r.urls) or r.servers))
    return _slots(config, model, gpu, lengths) < min(r.dp * r.max_num_seqs, each)


def _decode_seconds(config: RunConfig, model: HfConfig, gpu: Gpu, batch: float, context: float) -> float:
    """Return the seconds in which a server decodes one token for each of `batch` sequences of `context` tokens.

    Pipeline stages work on parts of the batch at the same time. Each stage reads its weights once for each part, so
    stages make room and save products, but no reading of weights. Data-parallel copies share the batch and the experts;
    each reads all other weights.
    """
    r, experts = config.rollout, model.experts
    links = Links(gpu, min(GPUS_PER_NODE, r.devices_per_node))
    own = batch / r.dp  # sequences of a copy
    of_experts = block_bytes(config) * expert_parameters(model)
    read = (engine_bytes(config, model) - of_experts) / r.tp + own * kv_bytes(config, model, int(context))
    reading = read / (gpu.memory_gb_per_s * 1e9 * DECODE_BANDWIDTH)
    if experts:  # a part of the batch touches this share of the experts
        touched = of_experts * (1 - (1 - experts.per_token / experts.count) ** (batch / r.pp))
        reading += touched / (r.tp * r.dp) / (gpu.memory_gb_per_s * 1e9 * EXPERT_DECODE_BANDWIDTH)
    flops = token_flops(model)
    rate = r.devices_per_server * gpu.bf16_tflops * 1e12 * PREFILL_EFFICIENCY
    computing = batch * (flops.blocks + flops.head) / rate
    talking = model.num_layers * 2 * links.all_reduce(own * model.hidden_size * 2, r.tp)
    if experts and r.dp > 1:  # every copy's tokens go to all workers, and the sums come back
        talking += 2 * len(experts.blocks) * links.reduce_scatter(batch * model.hidden_size * 2, r.dp, r.tp)
    if r.pp > 1:
        talking += r.pp * (links.latency(1) + links.seconds(own / r.pp * model.hidden_size * 2, r.tp * r.dp + 1))
    return max(reading, computing) + talking + DECODE_STEP_SECONDS + model.num_layers * LAYER_SECONDS


def sync_seconds(parts: dict[str, float]) -> float:
    """Return the seconds of a weight sync from its `sync_parts`: of its busiest end, plus the copies."""
    return max(parts["senders"], parts["receivers"]) + parts["copies"]


def sync_parts(config: RunConfig, model: HfConfig, world_size: int, gpu: Gpu) -> dict[str, float]:
    """Return the seconds of the `senders` and of the `receivers` of a weight sync, which overlap, and of the `copies`
    of `train.offload` to the host and back.

    A rank sends its part of the weights to all servers; a worker receives its part of the model. `megagrpo plan
    --weight-sync` computes both exactly.
    """
    r = config.rollout
    size = num_parameters(model) * config.model.weight_bytes
    experts = expert_parameters(model) * config.model.weight_bytes
    received = (size - experts + experts / r.dp) / (r.tp * r.pp)
    sent = received * server_gpus(config.rollout) / world_size
    links, span = Links(gpu), 1 if r.placed == "colocated" else 10**9
    copied = max(copied_bytes(config, model, world_size)) if config.takes_turns else 0
    ends = {"senders": links.seconds(sent, span), "receivers": links.seconds(received, span)}
    return ends | {"copies": copied / (HOST_GB_PER_S * 1e9)}


def _load_seconds(config: RunConfig, model: HfConfig, world_size: int) -> float:
    """Return the seconds for each node to read its ranks' weights."""
    p = config.parallel
    stage_bytes = max(o + e for o, e in zip(stage_parameters(model, p), stage_experts(model, p), strict=True)) * 2
    return stage_bytes * min(world_size, GPUS_PER_NODE) / (STORAGE_GB_PER_S * 1e9)
