"""Finds problems and notes of a config, its model and its number of ranks."""

from __future__ import annotations

import ast
from math import ceil
from pathlib import Path

from megagrpo.config import MultiTurnSection, Problem, ProblemError, RunConfig, evaluation_sets
from megagrpo.config.config_rules import LONGEST_SAMPLE
from megagrpo.config.tracker_options import PACKAGES
from megagrpo.environments.environment_registry import targets
from megagrpo.models.families.hf_config import HfConfig, projections
from megagrpo.proof.plan.gpu_specs import Gpu
from megagrpo.proof.plan.planned_memory import GIB, kv_bytes, reload_bytes, takes_turns
from megagrpo.rewards import reward_registry
from megagrpo.rewards.target import Target, did_you_mean


def layout_problems(config: RunConfig, world_size: int) -> list[Problem]:
    """Return problems of a number of ranks that the layout does not divide, of a micro-batch that alignment cuts below
    the longest sample, and of ranks that do not exist."""
    p, problems = config.parallel, []
    if world_size % p.model_parallel_size:
        nearest = [str(n) for n in _multiples(p.smallest_world, world_size)]
        said = (
            f"{world_size} is not a multiple of parallel.tp x parallel.cp x parallel.pp = {p.tp} x {p.cp} x {p.pp} = "
            f"{p.model_parallel_size}; use {' or '.join(nearest)} ranks"
        )
        problems.append(Problem(("world_size", "parallel.tp", "parallel.cp", "parallel.pp"), said, rule=6))
    elif world_size % p.expert_parallel_size:
        nearest = [str(n) for n in _multiples(p.smallest_world, world_size)]
        said = (
            f"{world_size} is not a multiple of parallel.ep x parallel.etp x parallel.pp = {p.ep} x {p.expert_tp} x "
            f"{p.pp} = {p.expert_parallel_size}; use {' or '.join(nearest)} ranks"
        )
        problems.append(Problem(("world_size", "parallel.ep", "parallel.etp", "parallel.pp"), said, rule=6))
    longest, budget, align = config.max_model_len, config.train.max_tokens_per_micro_batch, config.micro_batch_align
    if budget // align * align < longest <= budget:
        factors = " x ".join(_align_factors(config))
        said = (
            f"{budget} is cut to {budget // align * align}, a multiple of {factors} = {align}, and the longest sample "
            f"has {longest} tokens; use {ceil(longest / align) * align}"
        )
        problems.append(Problem(("train.max_tokens_per_micro_batch", *LONGEST_SAMPLE), said, rule=9))
    if unknown := [rank for rank in config.run.profile.ranks if rank >= world_size]:
        said = (
            f"rank {unknown[0]} does not exist: the run has {world_size} rank(s), counted from 0; leave ranks "
            f"empty for all"
        )
        problems.append(Problem(("run.profile.ranks",), said))
    return problems


def _align_factors(config: RunConfig) -> list[str]:
    """Return the factors of `config.micro_batch_align`, as text."""
    p, recipe = config.parallel, config.model.fp8_recipe
    if recipe == "none":
        return ["2 x parallel.cp"] * (p.cp > 1) + ["parallel.tp"] * p.sequence_parallel
    return (
        [f"{config.model.token_align} (model.fp8_recipe {recipe})"]
        + ["parallel.cp"] * (p.cp > 1)
        + ["parallel.tp"] * p.sequence_parallel
    )


def layout_notes(config: RunConfig, world_size: int) -> list[Problem]:
    """Return notes on settings that stop nothing: padding, ranks without samples, and a reference that never moves."""
    p, r, a, notes = config.parallel, config.rollout, config.algorithm, []
    if a.sync_ref_model and config.run.max_steps is not None and a.ref_model_sync_steps > config.run.max_steps:
        said = (
            f"{a.ref_model_sync_steps} is after the last step, run.max_steps {config.run.max_steps}, so the "
            f"reference never moves"
        )
        notes.append(Problem(("algorithm.ref_model_sync_steps", "run.max_steps"), said))
    if config.max_model_len % p.sequence_align:
        said = (
            f"every sample is padded to a multiple of 2 x cp = {p.sequence_align} tokens; the longest has "
            f"{config.max_model_len}"
        )
        notes.append(Problem(("parallel.cp", *LONGEST_SAMPLE), said, rule=9))
    dp, slices = world_size // p.model_parallel_size, config.algorithm.steps_per_generation
    samples = r.prompts_per_step * r.num_generations // slices
    if samples < dp:
        said = (
            f"an optimizer step has {samples} samples (responses, not prompts), fewer samples than data-parallel "
            f"ranks, {dp}; use {ceil(dp * slices / r.num_generations)} prompts or more"
        )
        notes.append(Problem(("rollout.prompts_per_step", "rollout.num_generations"), said, rule=11))
    return notes


def vocabulary_notes(config: RunConfig, model: HfConfig) -> list[Problem]:
    tp = config.parallel.tp
    if model.vocab_size % tp == 0:
        return []
    padded = model.padded_vocab(tp)
    said = (
        f"the vocabulary of {model.vocab_size} is padded to {padded} for tp={tp}; exports and weight syncs remove "
        f"the padding"
    )
    return [Problem(("parallel.tp",), said, rule=4)]


def _multiples(of: int, near: int) -> list[int]:
    """Return the positive multiples of `of` on both sides of `near`."""
    below = near // of * of
    return [n for n in (below, below + of) if n]


def expert_problems(config: RunConfig, model: HfConfig) -> list[Problem]:
    """Return requirements and limits of a mixture of experts that the config violates, and expert settings on a model
    without experts."""
    p, coefficient = config.parallel, config.algorithm.router_aux_loss_coef
    balance, problems = ("algorithm.router_aux_loss_coef",), []
    if model.experts and config.train.optimizer == "muon":
        said = f"muon does not support the experts of {model.family}; choose adam"
        problems.append(Problem(("train.optimizer",), said))
    if model.experts and model.experts.per_token > model.experts.count:
        said = (
            f"num_experts_per_tok {model.experts.per_token} exceeds the model's {model.experts.count} experts; "
            f"correct config.json"
        )
        problems.append(Problem(("model",), said, rule=7))
    if model.experts and p.tp > 1 and not p.sequence_parallel:
        said = f"false, but the experts of {model.family} need it with parallel.tp={p.tp}; set it to true"
        problems.append(Problem(("parallel.sequence_parallel", "parallel.tp"), said, rule=7))
    if coefficient and model.experts and (model.experts.sigmoid or model.experts.groups > 1):
        why = "the balancing loss needs experts chosen by softmax, without groups"
        problems.append(Problem(balance, f"{coefficient:g}, but {why}, unlike those of {model.family}; set it to 0"))
    if coefficient and not model.experts:
        problems.append(Problem(balance, f"{coefficient:g}, but {model.family} has no experts; set it to 0"))
    return problems


def adapter_problems(config: RunConfig, model: HfConfig) -> list[Problem]:
    """Return problems of LoRA's target modules: unknown projections, projections inside experts, and modules that vLLM
    takes no adapter for."""
    named = [] if config.lora.target_modules == "all-linear" else config.lora.projections
    inside = [name for name in named if name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")]
    problems, targets = [], ("lora.target_modules",)
    if config.lora.enabled and model.mla:
        said = f"{config.lora.rank}, but adapters do not support {model.family}'s latent attention; set it to 0"
        return [Problem(("lora.rank",), said)]
    own = [name for names in projections(model).values() for name in names]
    if odd := [name for name in named if name not in own and name not in inside * bool(model.experts)]:
        said = f"{model.family} has no {', '.join(odd)}; name some of {', '.join(own)}, or choose all-linear"
        problems.append(Problem(targets, said))
    fused = {"gate_up_proj"} & set(own) & set(config.lora.projections)
    # of GLM vLLM expects gate_proj and up_proj apart
    if config.lora.syncs_adapters and fused and "qkv_proj" not in own:
        said = (
            f"vLLM takes no adapter of the gate_up_proj of {model.family}; choose merged, or name other projections in "
        )
        problems.append(Problem(("lora.sync", *targets), f"{said}lora.target_modules"))
    if config.model.base_storage != "none":
        problems += storage_problems(config, model)
    if config.lora.enabled and model.experts and inside:
        said = (
            f"{', '.join(inside)} of {model.family} are inside its experts, which have no adapters; leave them "
            f"out, or choose "
        )
        problems.append(Problem(targets, f"{said}all-linear, which means all other projections"))
    return problems


def fp8_problems(config: RunConfig, model: HfConfig) -> list[Problem]:
    """Return problems of linears too narrow for FP8 products, and of named layers that do not exist."""
    m, align, problems = config.model, config.model.width_align, []
    if m.fp8_recipe == "none":
        return []
    if wrong := [i for i in m.bf16_layers if not -model.num_layers <= i < model.num_layers]:
        ends = f"-{model.num_layers} to {model.num_layers - 1}"
        problems.append(
            Problem(
                ("model.bf16_layers",),
                f"{wrong[0]} is out of range: the model has {model.num_layers} layers; use {ends}",
            )
        )
    if m.moe_router_padding_for_quantization and not model.experts:
        said = f"true needs experts, but {model.family} has none; set it to false"
        problems.append(Problem(("model.moe_router_padding_for_quantization",), said))
    odd = [(what, size) for what, size in _linear_sizes(config, model).items() if size % align]
    return problems + [
        Problem(
            ("model.fp8_recipe", "parallel.tp"),
            f"{m.fp8_recipe} needs multiples of {align}, but a rank's part of {what} is {size:g}; choose none or "
            f"another layout",
        )
        for what, size in odd
    ]


def gpu_problems(config: RunConfig, gpu: Gpu) -> list[Problem]:
    """Return FP8 recipes and kernels that the GPU does not support."""
    recipe, problems = config.model.fp8_recipe, []
    if recipe != "none" and not (gpu.fp8_tflops and (recipe != "mxfp8" or gpu.mxfp8)):
        others = "none, tensorwise, delayed or blockwise" if gpu.fp8_tflops else "none"
        problems.append(Problem(("model.fp8_recipe",), f"{recipe} does not run on {gpu.name}; choose {others}"))
    if config.train.fused_logprobs and not gpu.hopper:
        problems.append(
            Problem(("train.fused_logprobs",), f"true needs a Hopper GPU, but the GPU is {gpu.name}; set it to false")
        )
    return problems


def transport_problems(config: RunConfig) -> list[Problem]:
    """Return a transport of weights that cannot work on GPUs."""
    r = config.rollout
    if r.weight_sync_transport != "p2p" or r.placed != "colocated":
        return []
    said = (
        "p2p uses NCCL, which refuses two processes on one GPU, but rollout.placement is colocated; set the "
        "transport to auto"
    )
    return [Problem(("rollout.weight_sync_transport", "rollout.placement"), said)]


def _linear_sizes(config: RunConfig, model: HfConfig) -> dict[str, float]:
    """Return the input and output sizes of the blocks' linears on one rank, by the config values that make them."""
    p, mla, heads = config.parallel, model.mla, model.num_heads / config.parallel.tp
    sizes: dict[str, float] = {"hidden_size": model.hidden_size}
    if mla:
        sizes |= {
            "q_lora_rank": mla.query_rank or 0,
            "kv_lora_rank": mla.kv_rank,
            "heads x qk_head_dim": heads * model.head_dim,
        }
        sizes |= {
            "heads x (qk_nope_head_dim + v_head_dim)": heads * (mla.nope_dim + mla.value_dim),
            "heads x v_head_dim": heads * mla.value_dim,
        }
    else:
        both = heads + 2 * model.num_kv_heads / p.tp
        sizes |= {"heads x head_dim": heads * model.head_dim, "all heads x head_dim": both * model.head_dim}
    if not all(map(model.has_experts, range(model.num_layers))):
        sizes["intermediate_size"] = model.intermediate_size / p.tp
    if model.experts:
        sizes |= {"moe_intermediate_size": model.experts.intermediate_size / p.expert_tp}
        sizes |= {"the shared experts' width": model.experts.shared_size / p.tp}
    return sizes


def storage_problems(config: RunConfig, model: HfConfig) -> list[Problem]:
    """Return what prevents storing weights in fewer bits (`model.base_storage`)."""
    storage, tp = config.model.base_storage, config.parallel.tp
    if model.experts:
        return [
            Problem(
                ("model.base_storage",), f"{storage} does not support experts, which {model.family} has; choose none"
            )
        ]
    inputs = {"hidden_size": model.hidden_size, "heads x head_dim": model.num_heads * model.head_dim / tp}
    odd = [
        (what, size)
        for what, size in (inputs | {"intermediate_size": model.intermediate_size / tp}).items()
        if size % 64
    ]
    keys, fix = ("model.base_storage", "parallel.tp"), "choose none or another tp"
    return [Problem(keys, f"a rank's part of {what} is {size:g}, not a multiple of 64; {fix}") for what, size in odd]


def reward_problems(config: RunConfig) -> list[Problem]:
    """Return unknown reward names, and files that do not exist or do not define the function."""
    problems = _pass_function_problems(config)
    for i, reward in enumerate(config.rewards.functions):
        key = f"rewards.functions.{i}.function"
        try:
            problems += undefined(reward_registry.resolve(reward.function, config.rewards.plugins, key=key), key)
        except ProblemError as error:
            problems += error.problems
    return problems


def _pass_function_problems(config: RunConfig) -> list[Problem]:
    """Return the problem of an `evaluation.pass_function` that is no reward. A scheduler or an environment may give
    rewards by other names."""
    name, names = config.evaluation.pass_function, reward_registry.display_names(config.rewards.functions)
    if name is None or name in names or config.multi_turn.scheduler or config.multi_turn.environment:
        return []
    said = f"no reward function `{name}`{did_you_mean(name, names)}; name one of {', '.join(names)}"
    return [Problem(("evaluation.pass_function", "rewards.functions"), said)]


def own_code_problems(config: RunConfig) -> list[Problem]:
    """Return files and names of the user's own loss, callbacks and trackers that do not exist."""
    named = {f"run.callbacks.{i}": (name, "callback") for i, name in enumerate(config.run.callbacks)}
    named |= {
        f"run.trackers.{i}": (name, "tracker") for i, name in enumerate(config.run.trackers) if name not in PACKAGES
    }
    if config.algorithm.loss.custom:
        named["algorithm.loss_type"] = (config.algorithm.loss_type, "loss")
    problems: list[Problem] = []
    for key, (name, kind) in named.items():
        try:
            problems += undefined(reward_registry.locate(name, key, kind, {}), key, rule=None)
        except ProblemError as error:
            problems += error.problems
    return problems


def undefined(target: Target, key: str, rule: int | None = 18) -> list[Problem]:
    """Return the problem of a name that the file of `target` does not define.

    The file is parsed, not run, so the names of a star import remain unknown.
    """
    if not target.location.endswith(".py"):
        return []
    try:
        body = list(ast.walk(ast.parse(Path(target.location).read_bytes())))
    except SyntaxError as error:
        return [Problem((key,), f"{target.location}, line {error.lineno}: not valid Python: {error.msg}", rule=rule)]
    except (OSError, ValueError):
        return []  # the run reports the error
    defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    names = set(defined) | {node.id for node in body if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {
        alias.asname or alias.name
        for node in body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    if target.attribute in names or "*" in names:
        return []
    hint = did_you_mean(target.attribute, names)
    said = f"{target.location} defines no `{target.attribute}`{hint}; it defines {', '.join(defined) or 'nothing'}"
    return [Problem((key,), said, rule=rule)]


def multi_turn_problems(config: RunConfig) -> list[Problem]:
    """Return unknown names of schedulers, tools and environments."""
    named = {key: getattr(config.multi_turn, key) for key in ("scheduler", "environment")}
    known = {key: name for key, name in named.items() if name is not None}
    try:
        scheduler, tools, environment = targets(MultiTurnSection(**known, tools=config.multi_turn.tools))
    except ProblemError as error:
        return list(error.problems)
    by_key = {"multi_turn.scheduler": scheduler, "multi_turn.environment": environment}
    by_key |= {f"multi_turn.tools.{i}": tool for i, tool in enumerate(tools)}
    return [problem for key, target in by_key.items() if target is not None for problem in undefined(target, key)]


def rollout_problems(config: RunConfig, model: HfConfig) -> list[Problem]:
    """Return what the servers cannot shard or hold of this model."""
    r, problems = config.rollout, []
    shared_out = r.enable_expert_parallel
    valid = [tp for tp in range(1, model.num_heads + 1) if vllm_can_split(model, tp, shared_out)]
    if not r.urls and r.tp not in valid:
        widths = (
            f" and intermediate_size={' and '.join(map(str, widths))}"
            if (widths := _mlp_widths(model, shared_out))
            else ""
        )
        said = (
            f"vLLM cannot split {model.num_heads} heads, {model.num_kv_heads} KV heads, vocabulary "
            f"{_vllm_vocab(model)}{widths} over tp={r.tp}; valid tp: {', '.join(map(str, valid))}"
        )
        problems.append(Problem(("rollout.tp", "model.path"), said))
    if not r.urls and shared_out and not model.experts:
        problems.append(Problem(("rollout.enable_expert_parallel",), f"{model.family} has no experts; set it to false"))
    if not r.urls and shared_out and model.experts and model.experts.count < r.tp * r.dp:
        said = (
            f"{r.tp} x rollout.dp {r.dp} workers share {model.experts.count} experts, which leaves workers without "
            f"any; lower one"
        )
        problems.append(Problem(("rollout.tp", "rollout.dp", "rollout.enable_expert_parallel"), said))
    if not r.urls and r.pp > model.num_layers:
        said = (
            f"{r.pp} stages share {model.num_layers} layers, which leaves stages without any; set it to "
            f"{model.num_layers} or less"
        )
        problems.append(Problem(("rollout.pp", "model.path"), said))
    if config.max_model_len > model.max_positions:
        said = (
            f"max_prompt_length {r.max_prompt_length} + {config.response_limit} = {config.max_model_len} tokens, but "
            f"the model's limit is "
            f"{model.max_positions} (max_position_embeddings); shorten by {config.max_model_len - model.max_positions}"
        )
        problems.append(Problem(("rollout.max_completion_length", *LONGEST_SAMPLE), said, rule=14))
    for name, held_out in evaluation_sets(config).items():
        longest = r.max_prompt_length + held_out.max_completion_length
        if name and config.max_model_len < longest > model.max_positions:
            said = (
                f"max_prompt_length {r.max_prompt_length} + {held_out.max_completion_length} = {longest} tokens, but "
                f"the model's limit is "
                f"{model.max_positions} (max_position_embeddings); shorten by {longest - model.max_positions}"
            )
            problems.append(
                Problem((f"evaluation.sets.{name}.max_completion_length", "rollout.max_prompt_length"), said, rule=14)
            )
    needed = kv_bytes(config, model, config.max_model_len) / GIB
    if not r.urls and needed > r.kv_cache_gb:
        said = (
            f"{r.kv_cache_gb:g} cannot hold one sequence of {config.max_model_len} tokens; use "
            f"{ceil(needed * 10) / 10:g} or more"
        )
        problems.append(Problem(("rollout.kv_cache_gb", *LONGEST_SAMPLE), said, rule=14))
    return problems


def vllm_can_split(model: HfConfig, tp: int, experts_shared_out: bool = False) -> bool:
    """Whether vLLM starts on `model` with `tp` workers; with `experts_shared_out` each worker has whole experts."""
    whole = not any(
        size % tp for size in (model.num_heads, _vllm_vocab(model), *_mlp_widths(model, experts_shared_out))
    )
    return whole and (model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0)


def _vllm_vocab(model: HfConfig) -> int:
    """Return vLLM's vocabulary size: it pads the vocabulary to a multiple of 64 before sharding."""
    return -(-model.vocab_size // 64) * 64


def _mlp_widths(model: HfConfig, experts_shared_out: bool) -> list[int]:
    """Return the widths of MLPs that vLLM shards."""
    everywhere = all(map(model.has_experts, range(model.num_layers)))
    dense = [] if everywhere else [model.intermediate_size]
    if model.experts is None:
        return dense
    cut = [] if experts_shared_out else [model.experts.intermediate_size]
    return dense + cut + [model.experts.shared_size] * (model.experts.shared_size > 0)


def cache_problems(config: RunConfig, ram: float) -> list[Problem]:
    """Return the problem of KV caches, on servers without GPUs, that exceed the `ram` GiB of their machine."""
    r = config.rollout
    if r.urls or r.servers * r.kv_cache_gb <= ram:
        return []
    said = (
        f"{r.kv_cache_gb:g} x rollout.servers {r.servers} = {r.kv_cache_gb * r.servers:g} GiB, but this machine "
        f"has {ram:.1f} GiB of RAM"
    )
    return [Problem(("rollout.kv_cache_gb", "rollout.servers"), f"{said}; lower one of them", rule=20)]


KEPT_IN_RAM = {
    "offload": "train.offload",
    "moments": "train.optimizer_offload",
    "activations": "model.offload_activations",
}


def too_little_ram(host: dict[str, float], ram: float) -> list[Problem]:
    """Return the problem of a node whose ranks keep more in RAM (`host`, GiB by purpose) than `ram`."""
    in_ram = {key: host[name] for name, key in KEPT_IN_RAM.items() if host[name]}
    if sum(in_ram.values()) <= ram:
        return []
    largest, parts = max(in_ram, key=in_ram.__getitem__), ", ".join(f"{key} {size:.1f}" for key, size in in_ram.items())
    less = "lower it" if largest == "model.offload_activations" else "set it to false"
    said = (
        f"the ranks of a node keep {sum(in_ram.values()):.1f} GiB in RAM ({parts}), but the node has {ram:.1f}; {less}"
    )
    return [Problem((largest, *(key for key in in_ram if key != largest)), said)]


def too_big(
    config: RunConfig, model: HfConfig, memory: dict[str, dict[str, float]], smallest: float, gpu: float
) -> Problem:
    """Return the problem of a trainer rank or vLLM server that does not fit `gpu` GiB, with the keys to change."""
    r = config.rollout
    trainer = max(sum(parts.values()) for parts in memory.values())
    cuts = (
        "parallel.tp, parallel.ep, parallel.pp or parallel.cp"
        if model.experts
        else "parallel.tp, parallel.pp or parallel.cp"
    )
    less = f"raise {cuts}, lower train.max_tokens_per_micro_batch, or set model.recompute=full"
    reload, left = reload_bytes(config, model) / GIB, (1 - r.gpu_memory_utilization) * gpu
    if r.placed == "dedicated" and trainer < gpu and left < reload:
        said = (
            f"vLLM's {r.gpu_memory_utilization:g} of a GPU leaves {left:.1f} GiB, but a weight sync reloads a module "
            f"of {reload:.1f} GiB beside it; lower rollout.gpu_memory_utilization to "
            f"{int((1 - reload / gpu) * 100) / 100:g}, or raise rollout.tp"
        )
        return Problem(("rollout.gpu_memory_utilization", "rollout.tp"), said, rule=20)
    if (r.placed != "colocated" or takes_turns(config)) and trainer < gpu:
        said = (
            f"vLLM's {r.gpu_memory_utilization:g} of a GPU must hold its part of the weights and the longest sequence, "
            f"which needs "
            f"{smallest:.1f} GiB, but a GPU has {gpu:g}; raise rollout.tp or rollout.gpu_memory_utilization"
        )
        return Problem(("rollout.tp", "rollout.gpu_memory_utilization"), said, rule=20)
    if r.placed != "colocated" or takes_turns(config):
        return Problem(
            ("parallel.tp",), f"a trainer rank needs {trainer:.1f} GiB, but a GPU has {gpu:g}; {less}", rule=20
        )
    room = (gpu - trainer) / gpu
    if room > 0.05:
        fix = (
            f"lower it to {int(room * 100) / 100:g} or raise rollout.tp"
            if room < r.gpu_memory_utilization
            else "raise it or rollout.tp"
        )
    else:
        fix = less
    said = (
        f"a trainer rank of {trainer:.1f} GiB and vLLM's {r.gpu_memory_utilization:g} of the GPU need {smallest:.1f} "
        f"GiB, but it has {gpu:g}; {fix}"
    )
    return Problem(("rollout.gpu_memory_utilization", "rollout.tp"), said, rule=20)
