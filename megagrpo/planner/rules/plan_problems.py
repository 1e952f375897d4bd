"""Checks a run before it starts: its layout, the code and files that it names, its model, its servers, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from megagrpo.config import ConfigError, LoraSection, Problem, ProblemError, RolloutSection, RunConfig
from megagrpo.config.rules.config_rules import LONGEST_SAMPLE
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import MODEL_KEYS, HfConfig, load_hf_config, model_problems, trained_tower_problems
from megagrpo.families.weight_sources import shape_folder
from megagrpo.planner.costs.engine_memory import GIB, ServerMemory
from megagrpo.planner.costs.gpu_specs import Gpu
from megagrpo.planner.costs.planned_memory import Memory, run_memory
from megagrpo.planner.costs.shapes import modules_of
from megagrpo.planner.costs.teacher_costs import teacher_problems
from megagrpo.planner.rules.checked_files import data_problems, output_problems, tokenizer_problems
from megagrpo.planner.rules.code_problems import code_problems
from megagrpo.planner.rules.expert_problems import expert_problems
from megagrpo.planner.rules.vllm_problems import rollout_problems

IN_EXPERTS = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")  # projections that experts may have


@dataclass(frozen=True)
class Findings:
    """What the checks of a run found. `model` is None when it cannot be read or trained; `memory` is None too when the
    model does not fit the layout."""

    problems: list[Problem]
    model: HfConfig | None = None
    memory: Memory | None = None


def check(
    config: RunConfig,
    world_size: int,
    gpu_memory_gb: float | None = None,
    host_memory_gb: float | None = None,
    has_data: bool = True,
    fetch: bool = True,
) -> Findings:
    """Check `config` on `world_size` ranks. Needs no GPU, weights or torch.

    With `gpu_memory_gb`, GiB per GPU, the run must fit a GPU. With `host_memory_gb` data that stays in a node's RAM
    must fit. Without `has_data` data files are not checked. Without `fetch` no model is downloaded or unpacked.
    """
    config = config.without_servers
    rollout = config.rollout
    problems = list(layout_problems(config, world_size))
    if gpu_memory_gb is not None:
        problems += transport_problems(rollout)
    elif host_memory_gb is not None:
        problems += cache_problems(rollout, host_memory_gb)
    problems += [*_of_tasks(config, code_problems), *output_problems(config.run.output_dir)]
    if has_data:
        generates = config.algorithm.loss.generates
        problems += _of_tasks(config, lambda own: data_problems(own.data, own.evaluation.sets, generates))
    try:
        folder = shape_folder(config.model.path, fetch)
        model = load_hf_config(folder)
    except ProblemError as error:
        return Findings([*problems, *error.problems])
    unfit = model_problems(model, config.parallel)
    if any(problem.keys == MODEL_KEYS for problem in unfit):
        return Findings(problems + unfit)
    tokenizer = config.model.tokenizer or config.model.path
    problems += _of_tasks(config, lambda own: tokenizer_problems(tokenizer, own.data, model.vocab_size)) + unfit
    sequence = ServerMemory.of(config, model).kv_bytes(config.max_model_len) / GIB
    problems += [*expert_problems(config, model), *adapter_problems(config.lora, model)]
    problems += [*few_kv_head_problems(config, model), *teacher_problems(config, model, fetch)]
    problems += recurrent_problems(config, model)
    problems += [] if config.model.freeze_vision_tower else trained_tower_problems(model, config.parallel)
    problems += [*storage_problems(config, model), *fp8_problems(config, model)]
    problems += rollout_problems(config, model, sequence)
    if unfit:
        return Findings(problems, model)
    memory = run_memory(config, model, world_size, gpu_memory_gb)
    if host_memory_gb is not None and memory.host:
        problems += too_little_ram(memory.host, host_memory_gb)
    if gpu_memory_gb is not None and memory.smallest_gpu > gpu_memory_gb:
        problems.append(too_big(rollout, config.takes_turns, bool(model.experts), memory, gpu_memory_gb))
    return Findings(problems, model, memory)


def _of_tasks(config: RunConfig, find: Callable[[RunConfig], Iterable[Problem]]) -> list[Problem]:
    """Return what `find` finds in the config of each task, once."""
    found = [task.problem(problem) for task in config.each_task for problem in find(task.config)]
    return list(dict.fromkeys(found))


def require(
    config: RunConfig, world_size: int, gpu_memory_gb: float | None = None, host_memory_gb: float | None = None
) -> None:
    """Raise ConfigError with all problems that `check` finds."""
    if problems := check(config, world_size, gpu_memory_gb, host_memory_gb).problems:
        raise ConfigError("\n".join(map(str, problems)), problems)


def layout_problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Yield problems of a number of ranks that the layout does not divide, of a micro-batch that alignment cuts below
    the longest sample, and of ranks that do not exist."""
    yield from config.parallel.world_problems(world_size)
    longest, budget = config.max_model_len, config.train.max_tokens_per_micro_batch
    align = config.parallel.micro_batch_align(config.model.token_align)
    if budget // align * align < longest <= budget:
        factors = " x ".join(_align_factors(config))
        said = (
            f"{budget} is cut to {budget // align * align}, a multiple of {factors} = {align}, and the longest sample "
            f"has {longest} tokens; use {ceil(longest / align) * align}"
        )
        yield Problem(("train.max_tokens_per_micro_batch", *LONGEST_SAMPLE), said)
    if unknown := [rank for rank in config.run.profile.ranks if rank >= world_size]:
        said = f"rank {unknown[0]} does not exist: the run has {world_size} rank(s), counted from 0; leave ranks"
        yield Problem(("run.profile.ranks",), f"{said} empty for all")


def _align_factors(config: RunConfig) -> list[str]:
    """Return the factors of `config.micro_batch_align`, as text."""
    p, recipe = config.parallel, config.model.fp8_recipe
    context = "2 x parallel.cp" if recipe == "none" else "parallel.cp"
    rounded = [] if recipe == "none" else [f"{config.model.token_align} (model.fp8_recipe {recipe})"]
    return rounded + [context] * (p.cp > 1) + ["parallel.tp"] * p.sequence_parallel


def few_kv_head_problems(config: RunConfig, model: HfConfig) -> Iterator[Problem]:
    """Yield what is not supported where several tensor-parallel ranks share a KV head."""
    tp, of_layers = config.parallel.tp, [model.modules(layer) for layer in range(model.num_layers)]
    if tp <= model.num_kv_heads:
        return
    said = f"{tp} exceeds the {model.num_kv_heads} KV heads of {model.family}"
    if config.train.optimizer == "muon":
        reason = "muon needs whole groups of heads on a rank; lower it, or choose adam"
        yield Problem(("parallel.tp", "train.optimizer"), f"{said}, and {reason}")
    names = {name for of_layer in of_layers for name in of_layer.get("self_attention.linear_qkv", ())}
    fused = "adapters of gated attention" if model.attention_gate else "adapters of the fused qkv_proj"
    needed = [name for name in names if model.attention_gate or name.endswith(".qkv_proj")]
    if config.lora.enabled and any(map(config.lora.adapts, needed)):
        reason = f"{fused} need whole groups of heads on a rank; lower it"
        yield Problem(("parallel.tp", "lora.target_modules"), f"{said}, and {reason}")


def recurrent_problems(config: RunConfig, model: HfConfig) -> Iterator[Problem]:
    """Yield what is not supported with gated attention and recurrent parts."""
    if not model.attention_gate and model.recurrence is None:
        return
    what = "gated attention" if model.attention_gate or not model.recurrence else model.recurrence.name
    off = {
        "lora.sync": (config.lora.enabled and config.lora.syncs_adapters, "choose merged"),
        "model.base_storage": (config.model.base_storage != "none", "set it to none"),
        "train.optimizer": (config.train.optimizer == "muon", "choose adam"),
    }
    for key, (is_on, fix) in off.items():
        if is_on:
            yield Problem((key, "model.path"), f"{model.family} has {what}, which this does not know; {fix}")


def adapter_problems(lora: LoraSection, model: HfConfig) -> Iterator[Problem]:
    """Yield problems of LoRA's target modules and layers: names that the model lacks, projections inside experts, and
    modules that vLLM takes no adapter for."""
    modules = modules_of(model, range(model.num_layers))
    yield from _absent_targets(lora, model, modules)
    if lora.syncs_adapters:
        yield from _unserved_targets(lora, model, [name for name in modules if lora.adapts(name)])


def _named(names: Sequence[str] | None, modules: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names at which a module ends, and the others."""
    known = {name for name in names or () if any(f".{module}".endswith(f".{name}") for module in modules)}
    return [name for name in names or () if name in known], [name for name in names or () if name not in known]


def _absent_targets(lora: LoraSection, model: HfConfig, modules: Sequence[str]) -> Iterator[Problem]:
    targets, last = ("lora.target_modules",), model.num_layers - 1
    if beyond := [layer for layer in lora.layers_to_transform or [] if layer > last]:
        said = f"{beyond[0]} is out of range: the model has {model.num_layers} layers; use 0 to {last}"
        yield Problem(("lora.layers_to_transform",), said)
    absent = _named(lora.names, modules)[1]
    inside = [name for name in absent if model.experts and name in IN_EXPERTS]
    if odd := [name for name in absent if name not in inside]:
        own = ", ".join(name.rpartition(".")[2] for names in model.linears.values() for name in names)
        said = f"{model.family} has no {', '.join(odd)}; name some of {own}, or choose all-linear"
        yield Problem(targets, said)
    if lora.expression is not None and not any(map(lora.adapts, modules)):
        said = f"{lora.expression} matches no projection of {model.family}; one is {modules[0]}"
        yield Problem(targets, said)
    experts = [name for layer in range(model.num_layers) for name in model.expert_parameters(layer).values()]
    if odd := _named(lora.target_parameters, experts)[1]:
        said = f"{model.family} has no {', '.join(odd)}"
        fix = f"the first of its experts is {experts[0]}" if experts else "it has no experts; leave the list empty"
        yield Problem(("lora.target_parameters",), f"{said}; {fix}")
    if lora.enabled and inside:
        said = f"{', '.join(inside)} of {model.family} are inside its experts; name those in lora.target_parameters"
        yield Problem(targets, f"{said}, and leave them out here")


def _unserved_targets(lora: LoraSection, model: HfConfig, adapted: Sequence[str]) -> Iterator[Problem]:
    """Yield the `adapted` modules whose adapters vLLM cannot apply."""
    keys = ("lora.sync", "lora.target_modules")
    if any(name.endswith(".kv_b_proj") for name in adapted):
        said = f"adapter, but vLLM folds kv_b_proj of {model.family} into products that apply no adapter"
        yield Problem(keys, f"{said}; choose merged, or leave it out of lora.target_modules")
    if wrong := _named(FAMILIES[model.family].merged_only, adapted)[0]:
        said = f"adapter, but vLLM would apply adapters of {', '.join(wrong)} of {model.family} otherwise"
        yield Problem(keys, f"{said}; choose merged, or leave them out of lora.target_modules")
    # of GLM vLLM expects gate_proj and up_proj apart
    apart = not any(f".{name}".endswith(".qkv_proj") for names in model.linears.values() for name in names)
    if apart and any(name.endswith(".gate_up_proj") for name in adapted):
        said = f"vLLM takes no adapter of the gate_up_proj of {model.family}; choose merged, or name other projections"
        yield Problem(keys, f"{said} in lora.target_modules")


def fp8_problems(config: RunConfig, model: HfConfig) -> Iterator[Problem]:
    """Yield problems of linears too narrow for FP8 products, and of named layers that do not exist."""
    m, align = config.model, config.model.width_align
    if m.fp8_recipe == "none":
        return
    if wrong := [i for i in m.bf16_layers if not -model.num_layers <= i < model.num_layers]:
        last = model.num_layers - 1
        said = f"{wrong[0]} is out of range: the model has {model.num_layers} layers; use {-model.num_layers} to {last}"
        yield Problem(("model.bf16_layers",), said)
    for what, size in _linear_sizes(config, model).items():
        if size % align:
            said = f"{m.fp8_recipe} needs multiples of {align}, but a rank's part of {what} is {size:g}; choose none"
            yield Problem(("model.fp8_recipe", "parallel.tp"), f"{said} or another layout")


def gpu_problems(config: RunConfig, gpu: Gpu) -> Iterator[Problem]:
    """Yield FP8 recipes and kernels that the GPU does not support."""
    recipe = config.model.fp8_recipe
    if recipe != "none" and not (gpu.fp8_tflops and (recipe != "mxfp8" or gpu.mxfp8)):
        others = "none, tensorwise or blockwise" if gpu.fp8_tflops else "none"
        yield Problem(("model.fp8_recipe",), f"{recipe} does not run on {gpu.name}; choose {others}")
    if config.train.fused_logprobs and not gpu.hopper:
        yield Problem(("train.fused_logprobs",), f"true needs a Hopper GPU, but the GPU is {gpu.name}; set it to false")


def transport_problems(rollout: RolloutSection) -> Iterator[Problem]:
    """Yield a transport of weights that cannot work on GPUs."""
    if rollout.weight_sync_transport == "p2p" and rollout.placed == "colocated":
        said = "p2p uses NCCL, which refuses two processes on one GPU, but rollout.placement is colocated; set the"
        yield Problem(("rollout.weight_sync_transport", "rollout.placement"), f"{said} transport to auto")


def _linear_sizes(config: RunConfig, model: HfConfig) -> dict[str, float]:
    """Return the input and output sizes of the blocks' linears on one rank, by the config values that make them."""
    p, mla, heads = config.parallel, model.mla, model.num_heads / config.parallel.tp
    sizes: dict[str, float] = {"hidden_size": model.hidden_size}
    if mla:
        sizes |= {"q_lora_rank": mla.query_rank or 0, "kv_lora_rank": mla.kv_rank}
        sizes |= {
            "heads x qk_head_dim": heads * model.head_dim,
            "heads x (qk_nope_head_dim + v_head_dim)": heads * (mla.nope_dim + mla.value_dim),
            "heads x v_head_dim": heads * mla.value_dim,
        }
    else:
        queries = heads * (2 if model.attention_gate else 1)
        both = queries + 2 * model.num_kv_heads / p.tp
        sizes |= {"heads x head_dim": heads * model.head_dim, "all heads x head_dim": both * model.head_dim}
    if recurrence := model.recurrence:
        sizes[f"the input projection of {recurrence.name}"] = sum(recurrence.rows.values()) / p.tp
        sizes[f"the output projection of {recurrence.name}"] = recurrence.inner / p.tp
    if model.has_dense_mlps:
        sizes["intermediate_size"] = model.intermediate_size / p.tp
    if model.experts:
        sizes |= {"moe_intermediate_size": model.experts.intermediate_size / p.expert_tp}
        sizes |= {"the shared experts' width": model.experts.shared_size / p.tp}
    return sizes


def storage_problems(config: RunConfig, model: HfConfig) -> Iterator[Problem]:
    """Yield what prevents storing weights in fewer bits (`model.base_storage`)."""
    p, experts = config.parallel, model.experts
    if config.model.base_storage == "none":
        return
    inputs: dict[str, float] = {
        "hidden_size": model.hidden_size,
        "heads x head_dim": model.num_heads * model.value_dim / p.tp,
    }
    if model.has_dense_mlps:
        inputs["intermediate_size"] = model.intermediate_size / p.tp
    if experts:
        inputs["moe_intermediate_size"] = experts.intermediate_size / p.expert_tp
        inputs["the shared experts' width"] = experts.shared_size / p.tp
    if model.mla:
        inputs |= {"q_lora_rank": model.mla.query_rank or 0, "kv_lora_rank": model.mla.kv_rank}
    for what, size in inputs.items():
        if size % 64:
            said = f"a rank's part of {what} is {size:g}, not a multiple of 64; choose none or another layout"
            yield Problem(("model.base_storage", "parallel.tp"), said)


def cache_problems(r: RolloutSection, ram: float) -> Iterator[Problem]:
    """Yield the problem of KV caches, on servers without GPUs, that exceed the `ram` GiB of their machine."""
    total = r.servers * r.kv_cache_gb
    if not r.urls and total > ram:
        said = (
            f"{r.kv_cache_gb:g} x rollout.servers {r.servers} = {total:g} GiB, but this machine has {ram:.1f} GiB of "
        )
        yield Problem(("rollout.kv_cache_gb", "rollout.servers"), f"{said}RAM; lower one of them")


KEPT_IN_RAM = {
    "offload": "train.offload",
    "moments": "train.optimizer_offload",
    "activations": "model.offload_activations",
}


def too_little_ram(host: dict[str, float], ram: float) -> Iterator[Problem]:
    """Yield the problem of a node whose ranks keep more in RAM (`host`, GiB by purpose) than `ram`."""
    in_ram = {key: host[name] for name, key in KEPT_IN_RAM.items() if host[name]}
    if sum(in_ram.values()) <= ram:
        return
    largest, parts = max(in_ram, key=in_ram.__getitem__), ", ".join(f"{key} {size:.1f}" for key, size in in_ram.items())
    less = "lower it" if largest == "model.offload_activations" else "set it to false"
    said = (
        f"the ranks of a node keep {sum(in_ram.values()):.1f} GiB in RAM ({parts}), but the node has {ram:.1f}; {less}"
    )
    yield Problem((largest, *(key for key in in_ram if key != largest)), said)


def too_big(r: RolloutSection, turns: bool, has_experts: bool, memory: Memory, gpu: float) -> Problem:
    """Return the problem of a trainer rank or vLLM server that does not fit `gpu` GiB, with the keys to change.

    `turns`: both use the GPU in turns.
    """
    trainer, smallest = memory.trainer, memory.smallest_gpu
    experts = "parallel.ep, " if has_experts else ""
    less = f"raise parallel.tp, {experts}parallel.pp or parallel.cp, lower train.max_tokens_per_micro_batch"
    less = f"{less}, or set model.recompute=full"
    reload, left = memory.reload, (1 - r.gpu_memory_utilization) * gpu
    if r.placed == "dedicated" and trainer < gpu and left < reload:
        said = (
            f"vLLM's {r.gpu_memory_utilization:g} of a GPU leaves {left:.1f} GiB, but a weight sync reloads a module "
            f"of {reload:.1f} GiB beside it; lower rollout.gpu_memory_utilization to "
            f"{int((1 - reload / gpu) * 100) / 100:g}, or raise rollout.tp"
        )
        return Problem(("rollout.gpu_memory_utilization", "rollout.tp"), said)
    if (r.placed != "colocated" or turns) and trainer < gpu:
        said = (
            f"vLLM's {r.gpu_memory_utilization:g} of a GPU must hold its part of the weights and the longest sequence, "
            f"which needs {smallest:.1f} GiB, but a GPU has {gpu:g}; raise rollout.tp or rollout.gpu_memory_utilization"
        )
        return Problem(("rollout.tp", "rollout.gpu_memory_utilization"), said)
    if r.placed != "colocated" or turns:
        said = f"a trainer rank needs {trainer:.1f} GiB, but a GPU has {gpu:g}; {less}"
        return Problem(("parallel.tp",), said)
    room, fix = (gpu - trainer) / gpu, less
    if room > 0.05:
        lower = f"lower it to {int(room * 100) / 100:g} or raise rollout.tp"
        fix = lower if room < r.gpu_memory_utilization else "raise it or rollout.tp"
    said = f"a trainer rank of {trainer:.1f} GiB and vLLM's {r.gpu_memory_utilization:g} of the GPU need {smallest:.1f}"
    return Problem(("rollout.gpu_memory_utilization", "rollout.tp"), f"{said} GiB, but it has {gpu:g}; {fix}")
