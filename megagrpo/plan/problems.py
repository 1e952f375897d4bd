"""What stands in the way of a run, as `key: what is wrong; what to do`."""

from __future__ import annotations

from math import ceil

from megagrpo.config import MultiTurnSection, RunConfig, evaluation_sets
from megagrpo.multi_turn.registry import targets
from megagrpo.plan.gpus import Gpu
from megagrpo.plan.memory import GIB, kv_bytes, takes_turns
from megagrpo.policy.hf_config import HfConfig, projections
from megagrpo.rewards import registry


def layout_problems(config: RunConfig, world_size: int) -> list[str]:
    p, problems = config.parallel, []
    if world_size % p.model_parallel_size:
        nearest = [str(n) for n in _multiples(p.smallest_world, world_size)]
        problems.append(
            f"world_size: {world_size} is not a multiple of parallel.tp x parallel.cp x parallel.pp = {p.tp} x {p.cp} x {p.pp} = "
            f"{p.model_parallel_size}; use {' or '.join(nearest)} ranks"
        )
    elif world_size % p.expert_parallel_size:
        nearest = [str(n) for n in _multiples(p.smallest_world, world_size)]
        problems.append(
            f"world_size: {world_size} is not a multiple of parallel.ep x parallel.etp x parallel.pp = {p.ep} x {p.expert_tp} x {p.pp} = "
            f"{p.expert_parallel_size}; use {' or '.join(nearest)} ranks"
        )
    longest, budget, align = config.max_model_len, config.train.max_tokens_per_micro_batch, config.micro_batch_align
    if budget // align * align < longest <= budget:
        factors = " x ".join(_align_factors(config))
        problems.append(
            f"train.max_tokens_per_micro_batch: {budget} is cut to {budget // align * align}, a multiple of {factors} = {align}, "
            f"and the longest sample has {longest} tokens; use {ceil(longest / align) * align}"
        )
    return problems


def _align_factors(config: RunConfig) -> list[str]:
    """What `config.micro_batch_align` is made of."""
    p, recipe = config.parallel, config.model.fp8_recipe
    if recipe == "none":
        return ["2 x parallel.cp"] * (p.cp > 1) + ["parallel.tp"] * p.sequence_parallel
    return (
        [f"{config.model.token_align} (model.fp8_recipe {recipe})"] + ["parallel.cp"] * (p.cp > 1) + ["parallel.tp"] * p.sequence_parallel
    )


def layout_notes(config: RunConfig, world_size: int) -> list[str]:
    """What costs time, and stops nothing: padding, and ranks without samples."""
    p, r, notes = config.parallel, config.rollout, []
    if config.max_model_len % p.sequence_align:
        notes.append(
            f"parallel.cp: the longest sample, {config.max_model_len} tokens, is padded to a multiple of 2 x cp = {p.sequence_align}, as "
            "all others are"
        )
    dp, slices = world_size // p.model_parallel_size, config.algorithm.steps_per_generation
    samples = r.prompts_per_step * r.num_generations // slices
    if samples < dp:
        notes.append(
            f"rollout.prompts_per_step: an optimizer step has {samples} samples (responses, not prompts), fewer samples than data-parallel "
            f"ranks, {dp}; use {ceil(dp * slices / r.num_generations)} prompts or more"
        )
    return notes


def vocabulary_notes(config: RunConfig, model: HfConfig) -> list[str]:
    tp = config.parallel.tp
    if model.vocab_size % tp == 0:
        return []
    return [
        f"parallel.tp: the vocabulary of {model.vocab_size} is padded to {model.padded_vocab(tp)} for tp={tp}, and cut again in exports "
        "and syncs"
    ]


def _multiples(of: int, near: int) -> list[int]:
    """The positive multiples of `of` on both sides of `near`."""
    below = near // of * of
    return [n for n in (below, below + of) if n]


def expert_problems(config: RunConfig, model: HfConfig) -> list[str]:
    p, coefficient = config.parallel, config.algorithm.router_aux_loss_coef
    if model.experts and config.train.optimizer == "muon":
        return [f"train.optimizer: muon, and {model.family} has experts, which it does not know here; choose adam"]
    if model.experts and model.experts.per_token > model.experts.count:
        return [f"model: each token goes to {model.experts.per_token} experts (num_experts_per_tok), and there are {model.experts.count}"]
    if model.experts and p.tp > 1 and not p.sequence_parallel:
        return [f"parallel.sequence_parallel: {model.family} has experts, which with parallel.tp={p.tp} need it; set it to true"]
    if coefficient and model.experts and (model.experts.sigmoid or model.experts.groups > 1):
        why = "the loss is for experts chosen by softmax from all there are"
        return [f"algorithm.router_aux_loss_coef: {coefficient:g}, but {why}, which those of {model.family} are not; set it to 0"]
    if coefficient and not model.experts:
        return [f"algorithm.router_aux_loss_coef: {coefficient:g}, but {model.family} has no experts; set it to 0"]
    return []


def adapter_problems(config: RunConfig, model: HfConfig) -> list[str]:
    """Projections that are named although experts have them."""
    named = [] if config.lora.target_modules == "all-linear" else config.lora.projections
    inside = [name for name in named if name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")]
    problems = []
    if config.lora.enabled and model.mla:
        return [f"lora.rank: {config.lora.rank}, and no projection of {model.family}'s latent attention can have an adapter; set it to 0"]
    own = [name for names in projections(model).values() for name in names]
    if odd := [name for name in named if name not in own and name not in inside * bool(model.experts)]:
        problems.append(f"lora.target_modules: {model.family} has no {', '.join(odd)}; name some of {', '.join(own)}, or choose all-linear")
    fused = {"gate_up_proj"} & set(own) & set(config.lora.projections)
    if config.lora.syncs_adapters and fused and "qkv_proj" not in own:  # of GLM vLLM expects gate_proj and up_proj apart
        problems.append(
            f"lora.sync: vLLM takes no adapter of the gate_up_proj of {model.family}; choose merged, or name other projections in "
            "lora.target_modules"
        )
    if config.model.base_storage != "none":
        problems += storage_problems(config, model)
    if config.lora.enabled and model.experts and inside:
        problems.append(
            f"lora.target_modules: {', '.join(inside)} of {model.family} are in its experts, which have no adapters; leave them out, or "
            "choose all-linear, which is everything else"
        )
    return problems


def fp8_problems(config: RunConfig, model: HfConfig) -> list[str]:
    """Linears too narrow for products in FP8, and layers that are named but not there."""
    m, align, problems = config.model, config.model.width_align, []
    if m.fp8_recipe == "none":
        return []
    if wrong := [i for i in m.bf16_layers if not -model.num_layers <= i < model.num_layers]:
        ends = f"-{model.num_layers} to {model.num_layers - 1}"
        problems.append(f"model.bf16_layers: {wrong[0]}, and the model has {model.num_layers} layers; use {ends}")
    if m.moe_router_padding_for_quantization and not model.experts:
        problems.append(f"model.moe_router_padding_for_quantization: true is for experts, and {model.family} has none; set it to false")
    odd = [(what, size) for what, size in _linear_sizes(config, model).items() if size % align]
    return problems + [
        f"model.fp8_recipe: {m.fp8_recipe} multiplies by multiples of {align}, and a rank's part of {what} is {size:g}; choose none or "
        "another layout"
        for what, size in odd
    ]


def gpu_problems(config: RunConfig, gpu: Gpu) -> list[str]:
    """Recipes of FP8 that the GPU does not have, and kernels that are for others."""
    recipe, problems = config.model.fp8_recipe, []
    if recipe != "none" and not (gpu.fp8_tflops and (recipe != "mxfp8" or gpu.mxfp8)):
        others = "none, tensorwise, delayed or blockwise" if gpu.fp8_tflops else "none"
        problems.append(f"model.fp8_recipe: {recipe} does not run on {gpu.name}; choose {others}")
    if config.train.fused_logprobs and not gpu.hopper:
        problems.append(f"train.fused_logprobs: true is for Hopper GPUs, which {gpu.name} is not; set it to false")
    return problems


def _linear_sizes(config: RunConfig, model: HfConfig) -> dict[str, float]:
    """Inputs and outputs of the blocks' linears on one rank, by what makes them."""
    p, mla, heads = config.parallel, model.mla, model.num_heads / config.parallel.tp
    sizes: dict[str, float] = {"hidden_size": model.hidden_size}
    if mla:
        sizes |= {"q_lora_rank": mla.query_rank or 0, "kv_lora_rank": mla.kv_rank, "heads x qk_head_dim": heads * model.head_dim}
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


def storage_problems(config: RunConfig, model: HfConfig) -> list[str]:
    """What keeps weights from being stored in fewer bits."""
    storage, tp = config.model.base_storage, config.parallel.tp
    if model.experts:
        return [f"model.base_storage: {storage} is for linears, and {model.family} has experts; choose none"]
    inputs = {"hidden_size": model.hidden_size, "heads x head_dim": model.num_heads * model.head_dim / tp}
    odd = [(what, size) for what, size in (inputs | {"intermediate_size": model.intermediate_size / tp}).items() if size % 64]
    return [
        f"model.base_storage: a rank's part of {what} is {size:g}, and 64 elements share a scale; choose none or another tp"
        for what, size in odd
    ]


def reward_problems(config: RunConfig) -> list[str]:
    problems = []
    for i, reward in enumerate(config.rewards.functions):
        if ".py:" in reward.function:
            continue  # its folder is known when the run starts
        try:
            registry.resolve(reward.function)
        except ValueError as error:
            problems.append(str(error).replace("rewards.functions:", f"rewards.functions.{i}.function:", 1))
    return problems


def multi_turn_problems(config: RunConfig) -> list[str]:
    named = {key: getattr(config.multi_turn, key) for key in ("scheduler", "environment")}
    known = {key: name for key, name in named.items() if name is not None and ".py:" not in name}
    known["tools"] = [name for name in config.multi_turn.tools if ".py:" not in name]  # a file's folder is known when the run starts
    try:
        targets(MultiTurnSection(**known))
    except ValueError as error:
        return [str(error)]
    return []


def rollout_problems(config: RunConfig, model: HfConfig) -> list[str]:
    r, problems = config.rollout, []
    shared_out = r.enable_expert_parallel
    valid = [tp for tp in range(1, model.num_heads + 1) if vllm_can_split(model, tp, shared_out)]
    if not r.urls and r.tp not in valid:
        widths = f" and intermediate_size={' and '.join(map(str, widths))}" if (widths := _mlp_widths(model, shared_out)) else ""
        problems.append(
            f"rollout.tp: vLLM cannot split {model.num_heads} heads, {model.num_kv_heads} KV heads, vocabulary "
            f"{_vllm_vocab(model)}{widths} over tp={r.tp}; valid tp: {', '.join(map(str, valid))}"
        )
    if not r.urls and shared_out and not model.experts:
        problems.append(f"rollout.enable_expert_parallel: {model.family} has no experts; set it to false")
    if config.max_model_len > model.max_positions:
        problems.append(
            f"rollout.max_completion_length: max_prompt_length {r.max_prompt_length} + {config.response_limit} = "
            f"{config.max_model_len} tokens, but the model ends at {model.max_positions} (max_position_embeddings); shorten by "
            f"{config.max_model_len - model.max_positions}"
        )
    for name, held_out in evaluation_sets(config).items():
        longest = r.max_prompt_length + held_out.max_completion_length
        if name and config.max_model_len < longest > model.max_positions:
            problems.append(
                f"evaluation.sets.{name}.max_completion_length: max_prompt_length {r.max_prompt_length} + "
                f"{held_out.max_completion_length} = {longest} tokens, but the model ends at {model.max_positions} "
                f"(max_position_embeddings); shorten by {longest - model.max_positions}"
            )
    needed = kv_bytes(model, r.tp, config.max_model_len) / GIB
    if not r.urls and needed > r.kv_cache_gb:
        problems.append(
            f"rollout.kv_cache_gb: {r.kv_cache_gb:g} cannot hold one sequence of {config.max_model_len} tokens; "
            f"use {ceil(needed * 10) / 10:g} or more"
        )
    return problems


def vllm_can_split(model: HfConfig, tp: int, experts_shared_out: bool = False) -> bool:
    """Whether vLLM starts on `model` with `tp` workers; with `experts_shared_out` each of them has whole experts."""
    whole = not any(size % tp for size in (model.num_heads, _vllm_vocab(model), *_mlp_widths(model, experts_shared_out)))
    return whole and (model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0)


def _vllm_vocab(model: HfConfig) -> int:
    """vLLM pads the vocabulary to a multiple of 64, then cuts it."""
    return -(-model.vocab_size // 64) * 64


def _mlp_widths(model: HfConfig, experts_shared_out: bool) -> list[int]:
    """Sizes of MLPs that vLLM cuts."""
    everywhere = all(map(model.has_experts, range(model.num_layers)))
    dense = [] if everywhere else [model.intermediate_size]
    if model.experts is None:
        return dense
    cut = [] if experts_shared_out else [model.experts.intermediate_size]
    return dense + cut + [model.experts.shared_size] * (model.experts.shared_size > 0)


KEPT_IN_RAM = {"offload": "train.offload", "moments": "train.optimizer_offload", "activations": "model.offload_activations"}


def too_little_ram(host: dict[str, float], ram: float) -> list[str]:
    """What ranks of a node keep in its RAM, GiB by name, where that does not fit into `ram`."""
    kept = {key: host[name] for name, key in KEPT_IN_RAM.items() if host[name]}
    if sum(kept.values()) <= ram:
        return []
    largest, parts = max(kept, key=kept.get), ", ".join(f"{key} {size:.1f}" for key, size in kept.items())
    less = "lower it" if largest == "model.offload_activations" else "set it to false"
    return [f"{largest}: the ranks of a node keep {sum(kept.values()):.1f} GiB in RAM ({parts}), and it has {ram:.1f}; {less}"]


def too_big(config: RunConfig, model: HfConfig, memory: dict[str, dict[str, float]], smallest: float, gpu: float) -> str:
    r = config.rollout
    trainer = max(sum(parts.values()) for parts in memory.values())
    cuts = "parallel.tp, parallel.ep, parallel.pp or parallel.cp" if model.experts else "parallel.tp, parallel.pp or parallel.cp"
    less = f"raise {cuts}, lower train.max_tokens_per_micro_batch, or set model.recompute=full"
    if (r.placed != "colocated" or takes_turns(config)) and trainer < gpu:
        return (
            f"rollout.tp: vLLM's {r.gpu_memory_utilization:g} of a GPU must hold its part of the weights and the longest sequence, which "
            f"needs {smallest:.1f} GiB, and a GPU has {gpu:g}; raise rollout.tp or rollout.gpu_memory_utilization"
        )
    if r.placed != "colocated" or takes_turns(config):
        return f"parallel.tp: a trainer rank needs {trainer:.1f} GiB, and a GPU has {gpu:g}; {less}"
    room = (gpu - trainer) / gpu
    if room > 0.05:
        fix = f"lower it to {int(room * 100) / 100:g} or raise rollout.tp" if room < r.gpu_memory_utilization else "raise it or rollout.tp"
    else:
        fix = less
    return (
        f"rollout.gpu_memory_utilization: a trainer rank of {trainer:.1f} GiB and vLLM's {r.gpu_memory_utilization:g} of the GPU need "
        f"{smallest:.1f} GiB, and it has {gpu:g}; {fix}"
    )
