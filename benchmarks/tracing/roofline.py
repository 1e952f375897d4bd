"""The costs of a traced step by phase (FLOPs, bytes, kernel launches, messages, memory), its seconds on a kind of GPU,
and what keeps the MFU down. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from megagrpo.config import RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.engine_memory import GIB
from megagrpo.planner.costs.flops import model_flops
from megagrpo.planner.costs.gpu_specs import HOST_GB_PER_S, Gpu, Links
from megagrpo.planner.costs.hidden_messages import Direction, Overlap, overlap_row, sent_rows
from megagrpo.planner.costs.planned_memory import stage_memory
from megagrpo.planner.costs.workload import Lengths
from megagrpo.planner.times.pass_times import ATTENTION_EFFICIENCY, BANDWIDTH, DENSE_EFFICIENCY, EXPERT_EFFICIENCY

TRACE_PHASES = ("forward", "head", "backward", "reduce", "optimizer")
HOST_COPY = "host_copy"  # operation of a message between the GPU and the host
LAUNCH_SECONDS = 5e-6  # the host's time for one operation, launched from Python
EXPERT_LAUNCH_SECONDS = 2e-6  # the same for one expert's part of a grouped product, launched from C++
KERNEL_SECONDS = 2e-6  # the shortest kernel
EFFICIENCIES = {
    "products": DENSE_EFFICIENCY,
    "experts": EXPERT_EFFICIENCY,
    "attention": ATTENTION_EFFICIENCY,
    "elementwise": 1.0,
}


@dataclass(frozen=True)
class Kernel:
    """One launch: its phase, its kind (a key of `EFFICIENCIES`), FLOPs, and bytes that it reads and writes."""

    phase: str
    kind: str
    flops: float
    bytes: float


@dataclass(frozen=True)
class Message:
    """One collective or message: phase, operation, bytes of the larger side on this rank, and ranks of its group."""

    phase: str
    operation: str
    bytes: float
    ranks: int


@dataclass
class Costs:
    """Launches and messages of a piece of work, each with its count, and the host's waits by phase."""

    kernels: Counter[Kernel] = field(default_factory=Counter)
    messages: Counter[Message] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def plus(self, other: Costs, times: float = 1) -> Costs:
        """Return these costs and `times` the other ones. A negative `times` subtracts; counts stay exact."""
        kernels, messages = _sum(self.kernels, other.kernels, times), _sum(self.messages, other.messages, times)
        return Costs(kernels, messages, _sum(self.waits, other.waits, times))

    def total(self, what: str, phase: str | None = None, kind: str | None = None) -> float:
        """Return the sum of `flops` or `bytes`, or the number of `launches`, of one phase and kind or of all."""
        chosen = ((k, n) for k, n in self.kernels.items() if phase in (None, k.phase) and kind in (None, k.kind))
        return sum(n * (1 if what == "launches" else getattr(k, what)) for k, n in chosen)


def _sum[T](one: Mapping[T, float], other: Mapping[T, float], times: float) -> Counter[T]:
    made: Counter[T] = Counter(one)
    for key, count in other.items():
        made[key] += count * times
    return Counter({key: count for key, count in made.items() if count})


@dataclass(frozen=True)
class Trace:
    """A traced step of one rank: the `fixed` costs of a step, the costs of `each` micro-batch, and the bytes at the
    memory peak by the phase that allocated them.

    `tokens` is the number of tokens of a micro-batch, `loss_tokens` the number of them in the loss.
    """

    fixed: Costs
    each: Costs
    peak: Mapping[str, float]
    tokens: int
    loss_tokens: int

    def step(self, micro_batches: float) -> Costs:
        """Return the costs of a step with this many micro-batches."""
        return self.fixed.plus(self.each, micro_batches)


@dataclass(frozen=True)
class Roofline:
    """Seconds of a traced train step by phase, its MFU, the share of the step lost to each cause, largest first, and
    the seconds of `Overlap.gains`."""

    seconds: dict[str, float]
    mfu: float
    losses: dict[str, float]
    gains: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of the whole train step."""
        return sum(self.seconds.values())


def kernel_seconds(kernel: Kernel, gpu: Gpu) -> float:
    """Return the seconds of one kernel: by its FLOPs or by its bytes, whichever takes longer."""
    computing = kernel.flops / (gpu.bf16_tflops * 1e12 * EFFICIENCIES[kernel.kind])
    return max(computing, kernel.bytes / (gpu.memory_gb_per_s * 1e9 * BANDWIDTH), KERNEL_SECONDS)


def message_seconds(message: Message, gpu: Gpu) -> float:
    """Return the seconds of one message alone."""
    links = Links(gpu)
    if message.operation == HOST_COPY:
        return message.bytes / (HOST_GB_PER_S * 1e9)
    if message.operation in ("send", "recv"):
        return links.latency(1) + links.seconds(message.bytes, 1)
    if message.operation.startswith("alltoall"):
        return links.all_to_all(message.bytes, message.ranks)
    return (2 if message.operation == "allreduce" else 1) * links.reduce_scatter(message.bytes, message.ranks)


def micro_batches(config: RunConfig, trace: Trace, world_size: int, lengths: Lengths) -> int:
    """Return the number of micro-batches of a step on one replica, for samples of average length."""
    samples = config.rollout.prompts_per_step * config.rollout.num_generations
    dp = max(1, world_size // config.parallel.model_parallel_size)
    return max(config.parallel.pp, ceil(samples * lengths.sample / dp / trace.tokens))


def roofline(config: RunConfig, model: HfConfig, trace: Trace, world_size: int, gpu: Gpu, lengths: Lengths) -> Roofline:
    """Return seconds, MFU and lost shares of the traced rank's step, with pipeline bubbles. Messages overlap with
    computation as `train.overlap` and the dispatcher say; they do not in the trace."""
    count = micro_batches(config, trace, world_size, lengths)
    costs = trace.step(count)
    device = _by_phase(costs.kernels, lambda kernel: kernel_seconds(kernel, gpu))
    host = _by_phase(costs.kernels, lambda k: EXPERT_LAUNCH_SECONDS if k.kind == "experts" else LAUNCH_SECONDS)
    sent = sent_rows(config.parallel, model) / model.mixture.per_token if model.experts else 1.0

    def message(one: Message) -> float:
        to_experts = one.operation.startswith("alltoall")
        return message_seconds(replace(one, bytes=one.bytes * sent) if to_experts else one, gpu)

    messages = _by_phase(costs.messages, message)
    copied = sum(n * message(one) for one, n in costs.messages.items() if one.operation == HOST_COPY)
    overlap = _overlap(config, model, costs, count, gpu, message)
    gains, chosen = overlap.gains(), config.train.overlap
    if "param_gather" in gains:  # not of the last update, whose weights the weight sync needs
        share = 1 - 1 / config.algorithm.updates_per_step
        gathers = (one for one in costs.messages if one.phase == "optimizer" and one.operation.startswith("allgather"))
        gather = sum(costs.messages[one] * message(one) for one in gathers)
        gains["param_gather"] = min(gather, overlap.forward.computing / count) * share
    hidden = (*overlap.hidden_by(chosen), gains["param_gather"] if "param_gather" in chosen else 0.0)
    for phase, seconds in zip(("forward", "backward", "optimizer"), hidden, strict=True):
        messages[phase] -= seconds
    phases = {phase: max(device[phase], host[phase]) + messages[phase] for phase in TRACE_PHASES}
    passes = sum(phases[phase] for phase in ("forward", "head", "backward"))
    bubble = passes * (config.parallel.pp - 1) / (config.parallel.vpp * count)
    total = sum(phases.values()) + bubble
    samples = config.rollout.prompts_per_step * config.rollout.num_generations
    useful = model_flops(model, lengths.prompt, lengths.response, config.lora.enabled)
    ideal = samples * useful / world_size / (gpu.bf16_tflops * 1e12)
    losses = {
        "pipeline bubble": bubble,
        "messages": sum(messages.values()) - copied,
        "copies of moments to the host and back": copied,
        "launches": sum(max(0.0, host[phase] - device[phase]) for phase in TRACE_PHASES),
        **_device_losses(costs, gpu),
        "recomputation and padding": max(0.0, costs.total("flops") / (gpu.bf16_tflops * 1e12) - ideal),
    }
    largest_first = sorted(losses.items(), key=lambda item: -item[1])
    shares = {name: lost / total for name, lost in largest_first if lost > 0.001 * total}
    phases |= {"bubble": bubble} if bubble else {}
    return Roofline(phases, ideal / total, shares, gains)


def _overlap(
    config: RunConfig, model: HfConfig, costs: Costs, count: int, gpu: Gpu, message: Callable[[Message], float]
) -> Overlap:
    """Return what can overlap in the step of `count` micro-batches. In the passes all-to-alls are of experts, gathers
    and scatters of tensor parallelism."""

    def computing(phase: str, kind: str | None = None) -> float:
        chosen = ((k, n) for k, n in costs.kernels.items() if k.phase == phase and kind in (None, k.kind))
        return sum(n * kernel_seconds(k, gpu) for k, n in chosen)

    def sending(phase: str, *operations: str) -> float:
        chosen = ((m, n) for m, n in costs.messages.items() if m.phase == phase and m.operation.startswith(operations))
        return sum(n * message(m) for m, n in chosen)

    def direction(phase: str) -> Direction:
        products = computing(phase, "products"), computing(phase, "experts")
        tp = sending(phase, "allgather", "reduce_scatter", "allreduce") if config.parallel.tp > 1 else 0.0
        return Direction(*products, computing(phase), tp, sending(phase, "alltoall"))

    return Overlap(config, model, direction("forward"), direction("backward"), count)


def _by_phase[T: (Kernel, Message)](counts: Mapping[T, float], seconds: Callable[[T], float]) -> dict[str, float]:
    return {phase: sum(n * seconds(one) for one, n in counts.items() if one.phase == phase) for phase in TRACE_PHASES}


def _device_losses(costs: Costs, gpu: Gpu) -> dict[str, float]:
    """Return the device's seconds beyond its FLOPs at the peak rate, by cause."""
    lost: dict[str, float] = {}
    for kernel, count in costs.kernels.items():
        name = None if kernel.kind == "elementwise" else f"{kernel.kind} below the peak rate"
        if name is None:
            outer = "optimizer and gradients" if kernel.phase in ("reduce", "optimizer") else "layers"
            name = f"elementwise work of the {'LM head' if kernel.phase == 'head' else outer}"
        beyond = kernel_seconds(kernel, gpu) - kernel.flops / (gpu.bf16_tflops * 1e12)
        lost[name] = lost.get(name, 0.0) + count * beyond
    return lost


def trace_rows(
    config: RunConfig, model: HfConfig, trace: Trace, world_size: int, stage: int, gpu: Gpu | None, lengths: Lengths
) -> list[tuple[str, str]]:
    """Return the rows that `benchmarks/plan_trace.py` prints."""
    count = micro_batches(config, trace, world_size, lengths)
    costs = trace.step(count)
    made = None if gpu is None else roofline(config, model, trace, world_size, gpu, lengths)
    sizes = f"{count} micro-batches of {trace.tokens:,} tokens, {trace.loss_tokens:,} of them in the loss"
    rows = [("trace", f"one rank of stage {stage}: {sizes}")]
    for phase in TRACE_PHASES:
        text = (
            f"{costs.total('flops', phase) / 1e12:,.1f} TFLOP, {costs.total('bytes', phase) / 1e9:,.0f} GB of memory "
            "traffic, "
        )
        text += f"{costs.total('launches', phase):,.0f} kernel launches, {costs.waits[phase]:,.0f} waits of the host"
        rows.append((phase, text + (f"; {made.seconds[phase]:.2f} s" if made else "")))
    dp = max(1, world_size // config.parallel.model_parallel_size)
    planned = sum(stage_memory(config, model, dp)[stage]["train"].values())
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in trace.peak.items() if size > 0.01 * GIB)
    traced = f"{sum(trace.peak.values()) / GIB:.1f} GiB, allocated in {parts}"
    rows.append(("peak", f"{traced}; planned {planned:.1f}"))
    if made is not None:
        rows.append(("roofline", f"{made.total:.2f} s for the train step of this rank, MFU {made.mfu:.0%}"))
        lost = (f"{name} {share:.0%}" for name, share in made.losses.items() if share >= 0.01)
        rows.append(("lost to", ", ".join(lost)))
        rows += overlap_row(config, model, made.gains)
    return rows
