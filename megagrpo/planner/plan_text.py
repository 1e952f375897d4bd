"""Formats a plan as text."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from megagrpo.config import LoraSection, ParallelSection, RolloutSection, RunConfig, weight_path
from megagrpo.families.hf_config import HfConfig
from megagrpo.families.shared.architecture import Experts
from megagrpo.planner.costs.engine_memory import ServerMemory
from megagrpo.planner.costs.planned_memory import Memory
from megagrpo.planner.costs.shapes import (
    modules_of,
    num_active_parameters,
    num_parameters,
    stage_adapters,
    stage_expert_adapters,
)
from megagrpo.planner.costs.workload import limits_of_tasks, step_samples
from megagrpo.planner.times.step_times import StepTimes
from megagrpo.platform.process.terminal import side_by_side


def rows_of(
    config: RunConfig, world_size: int, gpu_memory_gb: float | None, model: HfConfig | None, memory: Memory | None
) -> list[tuple[str, str]]:
    """Return the rows of a plan, as (name, text). `model` and `memory` are None if they are not known."""
    dp = max(1, world_size // config.parallel.model_parallel_size)
    rows = [] if model is None else [("model", _model_text(config.model.path, model))]
    if model is not None and config.lora.enabled:
        rows.append(("LoRA", _lora_text(config.lora, model)))
    rows.append(("layout", _layout_text(config.parallel, world_size, dp)))
    if model is not None and model.experts:
        rows.append(("experts", _experts_text(config.parallel, model.experts, world_size)))
    if config.train.overlap:
        rows.append(("overlap", ", ".join(config.train.overlap)))
    rows.append(("machine", _machine_text(config, world_size, gpu_memory_gb)))
    generates = config.generates
    if generates:
        rows.append(("rollout", _rollout_text(config.rollout, config.max_model_len)))
    if generates and model is not None and memory is not None and gpu_memory_gb is not None and not config.rollout.urls:
        rows.append(("vLLM", _cache_text(config, model, gpu_memory_gb)))
    rows += [("weights", _weights_text(config, True if gpu_memory_gb else None))] if generates else []
    rows.append(("step", _step_text(config, dp)))
    rows += [("tasks", _tasks_text(config))] if config.tasks else []
    if memory is not None:
        placed = config.without_servers.rollout.placed
        rows.append(("GPU", _gpu_text(placed, generates and config.takes_turns, memory.smallest_gpu)))
        rows += [("host", _host_text(memory.host))] if memory.host else []
    return rows


def _machine_text(config: RunConfig, world_size: int, gpu: float | None) -> str:
    """Return the machine that the plan assumes."""
    if gpu is None:
        options = "gpu_memory_gb=80" + " or --gpu h100" * config.generates
        return f"no GPUs: {world_size} rank(s) share the RAM of a host; {options} plans for GPUs"
    servers, r = "", config.without_servers.rollout
    if r.placed == "dedicated":
        servers = f", and {r.servers * r.devices_per_server} more for vLLM"
    return f"{world_size} GPU(s) of {gpu:g} GiB, one for each rank{servers}"


def _layout_text(parallel: ParallelSection, world_size: int, dp: int) -> str:
    """Return the number of ranks as the product of the layout's axes."""
    context = f" x cp {parallel.cp}" if parallel.cp > 1 else ""
    cuts = [f"vpp {parallel.vpp}"] * (parallel.vpp > 1)
    cuts += [f"layers {' '.join(map(str, parallel.pipeline_layers))}"] if parallel.pipeline_layers else []
    stages = f" ({', '.join(cuts)})" if cuts else ""
    return f"{world_size} rank(s) = tp {parallel.tp}{context} x pp {parallel.pp}{stages} x dp {dp}"


def _model_text(path: str, model: HfConfig) -> str:
    embeddings = "tied" if model.tied_embeddings else "untied"
    active = f" ({num_active_parameters(model) / 1e6:,.1f}M active)" if model.experts else ""
    return (
        f"{path}: {model.family}, {num_parameters(model) / 1e6:,.1f}M parameters{active}, {model.num_layers} layers, "
        f"{model.num_heads} heads, {model.num_kv_heads} KV heads, {embeddings} embeddings"
    )


def _experts_text(p: ParallelSection, experts: Experts, world_size: int) -> str:
    sizes = f"etp {p.expert_tp} x ep {p.ep} x {max(1, world_size // p.expert_parallel_size)} copies"
    counts = f"{experts.count} in {len(experts.blocks)} layers, {experts.per_token} a token"
    sent = "" if p.expert_dispatcher == "alltoall" else f", sent by {p.expert_dispatcher}"
    return f"{counts}; the ranks of a stage = {sizes}, {experts.count // p.ep} experts on each{sent}"


def _lora_text(lora: LoraSection, model: HfConfig) -> str:
    alone = model, ParallelSection(), lora
    trained = sum((*stage_adapters(*alone), *stage_expert_adapters(*alone)))
    share = trained / num_parameters(model)
    layers = range(model.num_layers)
    adapted = [[name for name in modules_of(model, [layer]) if lora.adapts(name)] for layer in layers]
    where = ", ".join(dict.fromkeys(name.rpartition(".")[2] for of_layer in adapted for name in of_layer))
    where += f" in {sum(map(bool, adapted))} of {len(layers)} layers" if any(adapted) and not all(adapted) else ""
    experts = [
        name for layer in layers for name in model.expert_parameters(layer).values() if lora.adapts_experts(name)
    ]
    of_experts = dict.fromkeys(name.split(".mlp.")[1] for name in experts)
    where = ", ".join(filter(None, (where, *of_experts)))
    size = f"{trained:,} trained parameters, {share:.2%} of the model's"
    return f"rank {lora.rank}, scale {lora.scale:g}, on {where}: {size}"


def _rollout_text(r: RolloutSection, max_model_len: int) -> str:
    if r.urls:
        return f"{len(r.urls)} external vLLM server(s), up to {max_model_len} tokens a sequence"
    sizes = r.server_text.replace("rollout.", "") + f" on {r.nodes_per_server} nodes each" * (r.nodes_per_server > 1)
    share = f"{r.gpu_memory_utilization:.0%} of a GPU's memory, or weights + {r.kv_cache_gb:g} GiB of RAM"
    share += f"; linear layers in {r.quantization}" * (r.quantization != "none")
    return f"{r.servers} vLLM server(s) x {sizes}, up to {max_model_len} tokens a sequence; each takes {share}"


def _cache_text(config: RunConfig, model: HfConfig, gpu: float) -> str:
    """Return weights and KV cache per GPU of a server that the run starts, and the number of sequences that fit."""
    server, r = ServerMemory.of(config, model), config.rollout
    memory = server.parts(gpu)
    fit = int(memory["kv_cache"] / server.sequence())
    wanted = min(r.max_num_seqs, ceil(step_samples(config) / r.servers))
    return (
        f"on each GPU {memory['vllm_weights']:.1f} GiB of weights and {memory['kv_cache']:.1f} GiB of KV cache, "
        f"{fit:,} sequences of {config.max_model_len} tokens; a server gets {wanted:,} at once"
    )


def _weights_text(config: RunConfig, gpu: bool | None) -> str:
    """Return the weight sync's transport and its reason; with and without GPUs when `gpu` is None. Only colocated
    servers are known to be on several hosts."""
    transports, one_host = {}, config.run.nodes == 1 or config.rollout.placed != "colocated"
    for has_gpu, where in ((True, "on GPUs"), (False, "without GPUs")):
        if gpu in (has_gpu, None):
            try:
                transport, why = weight_path(config, has_gpu, one_host)
                transports[where] = f"{transport} ({why})"
            except ValueError as error:
                transports[where] = str(error)
    if len(set(transports.values())) == 1:
        return next(iter(transports.values()))
    return ", ".join(f"{where} {what}" for where, what in transports.items())


def _step_text(config: RunConfig, dp: int) -> str:
    r, t = config.rollout, config.train
    samples = step_samples(config)
    tokens = samples * config.max_model_len
    per_rank = max(config.parallel.pp, ceil(tokens / dp / t.max_tokens_per_micro_batch))
    batches = f"{per_rank} micro-batch(es) of {t.max_tokens_per_micro_batch:,} on each of {dp} data-parallel rank(s)"
    group = " or ".join(map(str, sorted({*config.group_sizes.values()})))
    prompts = f"{r.prompts_per_step} prompts x {group} generations = {samples} samples"
    if not config.algorithm.loss.generates:
        prompts = f"{r.prompts_per_step} rows x {config.samples_per_row} response(s) = {samples} samples"
    return f"{prompts}, at most {tokens:,} tokens = {batches}"


def _tasks_text(config: RunConfig) -> str:
    """Return what each task has of a step, and its limits."""
    return "; ".join(
        f"{task.name} {task.share:.0%} of the prompts x {task.group}, prompts of up to {task.prompt} and responses of "
        f"up to {task.response} tokens"
        for task in limits_of_tasks(config.each_task)
    )


def _gpu_text(placed: str, turns: bool, smallest: float) -> str:
    what = {
        "colocated": "a trainer rank and its share of a vLLM server",
        "dedicated": "a trainer rank or its share of a vLLM server",
        "external": "a trainer rank",
    }
    occupants = "a trainer rank and a vLLM server in turns" if turns else what[placed]
    return f"each needs {smallest:.1f} GiB or more to hold {occupants}; without GPUs: RAM"


def _host_text(host: dict[str, float]) -> str:
    """Return the trainer's RAM on the fullest node."""
    texts = {"moments": " for moments", "offload": ", pinned, for state offloaded while vLLM generates"}
    texts |= {"activations": ", pinned, for activations"}
    purposes = "".join(f"{host[name]:.1f} GiB{text}, " for name, text in texts.items() if host[name])
    after = f"; {host['writing']:.1f} GiB until it is written" if host["writing"] else ""
    return f"{purposes}{host['saving']:.1f} GiB of the fullest node's RAM while a checkpoint is assembled{after}"


def memory_table(memory: dict[str, dict[str, float]]) -> Sequence[str]:
    phases = sorted(memory, key="generate".__eq__)  # parts that only the server has come last
    known = dict.fromkeys(part for phase in phases for part, size in memory[phase].items() if size)
    parts = [part for part in known if part != "total"] + ["total"]
    beside = ", and of the vLLM server on its GPU" * ("kv_cache" in known)
    columns = [
        [f" {part:>7}", *(f" {sizes.get(part, 0):{max(7, len(part))}.2f}" for sizes in memory.values())]
        for part in parts
    ]
    rows = side_by_side([f"{name:<10}" for name in ("", *memory)], columns)
    return [f"trainer, GiB on the fullest rank{beside}", *rows]


def times_table(times: StepTimes) -> Sequence[str]:
    """Return the seconds of each phase, what bounds the step, tokens per second, MFU and idle share."""
    names = [*times.seconds, "step"]
    seconds = times.seconds | {"step": times.step}
    parts = [f"{name} {size:.2f}" for name, size in times.control.items() if name != "read"]
    ends = max(times.sync, key=times.sync.__getitem__)
    return [
        "predicted seconds (load is once a run)",
        "".join([f"{'':<10}", *(f"{name:>11}" for name in names)]),
        "".join([f"{'seconds':<10}", *(f"{seconds[name]:11.1f}" for name in names)]),
        f"bound by {times.bound}; weight sync {seconds['sync']:.2f} s, bound by {ends}",
        f"control {seconds['control']:.2f} s: {', '.join(parts)}; beside generation {times.control['read']:.2f}",
        f"{times.tokens_per_gpu:,.0f} tokens/s/GPU on {times.gpus:,} GPU(s), MFU of the train phase {times.mfu:.1%}",
        f"idle {times.idle:.1%} of all GPUs' time, pipeline bubble {times.bubble:.1%}",
    ]
