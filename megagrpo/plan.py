"""Preflight: whether a config fits its model and its number of ranks, and what each rank holds. Needs no GPU, no weights and no torch.

Every problem is found at once, as `key: what is wrong; what to do`. Memory is arithmetic on shapes: weights, gradients and optimizer
state are exact, activations are an estimate (the tensors that the backward pass keeps), kernels' workspaces are not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import ceil
from pathlib import Path
from typing import Any

from megagrpo.config import ParallelSection, RunConfig
from megagrpo.policy.hf_config import HfConfig, model_problems, parse_hf_config, read_raw_config, stage_layers
from megagrpo.rewards import registry

GIB = 2**30
KNOWN_SHAPES = Path(__file__).parents[1] / "configs" / "models"  # OWNER/NAME/config.json, for machines that cannot reach the hub


@dataclass(frozen=True)
class Plan:
    """`problems` is empty when the run can start. `memory` is phase -> part -> GiB on the rank that holds most; empty without a model."""

    problems: list[str]
    rows: list[tuple[str, str]]
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    smallest_gpu: float = 0.0  # GiB that a GPU needs to hold a trainer rank and its share of a vLLM server; 0 without a model

    def __str__(self) -> str:
        lines = [f"{name:<10}{text}" for name, text in self.rows]
        if self.memory:
            lines += ["", *_memory_table(self.memory)]
        if self.problems:
            lines += ["", f"{len(self.problems)} problem(s)", *(f"  {problem}" for problem in self.problems)]
        return "\n".join(lines)


def main(config: RunConfig, world_size: int | None = None, gpu_memory_gb: float | None = None) -> int:
    """Prints the plan; exit code 2 when something is wrong. Without `world_size`: as few ranks as the layout takes."""
    made = plan(config, world_size or config.parallel.smallest_world, gpu_memory_gb)
    print(made, file=sys.stderr if made.problems else sys.stdout)
    return 2 if made.problems else 0


def plan(config: RunConfig, world_size: int, gpu_memory_gb: float | None = None) -> Plan:
    """The plan of `config` on `world_size` ranks. With `gpu_memory_gb`, the memory of each GPU in GiB, it must also fit there."""
    parallel = config.parallel
    problems = _layout_problems(config, world_size) + _reward_problems(config)
    dp = max(1, world_size // parallel.model_parallel_size)
    context = f" x cp {parallel.cp}" if parallel.cp > 1 else ""
    stages = [f"vpp {parallel.vpp}"] * (parallel.vpp > 1)
    stages += [f"layers {' '.join(map(str, parallel.pipeline_layers))}"] if parallel.pipeline_layers else []
    stages = f" ({', '.join(stages)})" if stages else ""
    rows = [
        ("layout", f"{world_size} rank(s) = tp {parallel.tp}{context} x pp {parallel.pp}{stages} x dp {dp}"),
        ("rollout", _rollout_text(config)),
        ("step", _step_text(config, dp)),
    ]
    try:
        raw = model_shape(config.model.path)
    except ValueError as error:
        return Plan([*problems, *str(error).split("\n")], rows)
    unfit = model_problems(raw, parallel)
    if any(problem.startswith("model") for problem in unfit):
        return Plan(problems + unfit, rows)
    model = parse_hf_config(raw)
    rows.insert(0, ("model", _model_text(config.model.path, model)))
    if model.experts:
        rows.insert(2, ("experts", _experts_text(config, model, world_size)))
    problems += unfit + _expert_problems(config, model) + _rollout_problems(config, model)
    if unfit:
        return Plan(problems, rows)
    memory = trainer_memory(config, model, dp)
    smallest = _smallest_gpu(config, model, memory)
    rows.append(("GPU", f"each needs {smallest:.1f} GiB or more to hold a trainer rank and its share of a vLLM server; without GPUs: RAM"))
    if gpu_memory_gb is not None and smallest > gpu_memory_gb:
        problems.append(_too_big(config, memory, smallest, gpu_memory_gb))
    for parts in memory.values():
        parts["total"] = sum(parts.values())
    return Plan(problems, rows, memory, smallest)


# ------------------------------------------------------------------------------------------------------------------- the model


def model_shape(path: str) -> dict[str, Any]:
    """config.json of `model.path` without its weights: from a folder, the hub's cache, `configs/models`, or the hub.

    The weights of `package:NAME` come as one file, so they are unpacked here if they were not before. ValueError when none has it.
    """
    if path.startswith("package:"):
        from megagrpo.bridge.sources import resolve_model

        return read_raw_config(resolve_model(path))
    if Path(path).expanduser().exists():
        return read_raw_config(Path(path).expanduser())
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return read_raw_config(Path(hf_hub_download(path, "config.json", local_files_only=True)).parent)
    except HFValidationError:
        raise ValueError(f"model.path: {path} does not exist; name a folder, a hub model as owner/name, or package:NAME") from None
    except LocalEntryNotFoundError:
        pass
    if (KNOWN_SHAPES / path / "config.json").exists():
        return read_raw_config(KNOWN_SHAPES / path)
    try:
        return read_raw_config(Path(hf_hub_download(path, "config.json")).parent)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"model.path: {path} is no folder here, and the hub does not give its config.json; name a folder, or download it first "
            f"(hf download {path}). {type(error).__name__}"
        ) from None


def layer_parameters(model: HfConfig, layer: int, tp: int = 1) -> int:
    """Parameters of one layer on one of `tp` ranks, without experts; their router is on every rank."""
    projections = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    biases = model.head_dim * (model.num_heads + 2 * model.num_kv_heads) if model.qkv_bias else 0
    norms = 2 * model.hidden_size + (2 * model.head_dim if model.qk_norm else 0)
    if model.has_experts(layer):
        return (projections + biases) // tp + norms + model.experts.count * model.hidden_size
    mlp = 3 * model.hidden_size * model.intermediate_size
    return (projections + biases + mlp) // tp + norms


def stage_experts(model: HfConfig, parallel: ParallelSection) -> list[int]:
    """Parameters of experts on one rank of each pipeline stage."""
    if model.experts is None:
        return [0] * parallel.pp
    one = 3 * model.hidden_size * model.experts.intermediate_size // parallel.expert_tp
    return [one * model.experts.count // parallel.ep * sum(map(model.has_experts, layers)) for layers in layers_of_ranks(model, parallel)]


def layers_of_ranks(model: HfConfig, parallel: ParallelSection) -> list[list[int]]:
    """The numbers of the layers on a rank of each pipeline stage, those of all its virtual stages together."""
    pieces = [range(start, stop) for start, stop in pairwise(accumulate(stage_layers(model.num_layers, parallel), initial=0))]
    return [[layer for piece in pieces[stage :: parallel.pp] for layer in piece] for stage in range(parallel.pp)]


def stage_parameters(model: HfConfig, parallel: ParallelSection) -> list[int]:
    """Parameters on one rank of each pipeline stage, without experts; a tied output layer is a second copy when it sits on another
    stage."""
    tp = parallel.tp
    sizes = [sum(layer_parameters(model, layer, tp) for layer in layers) for layers in layers_of_ranks(model, parallel)]
    embedding = model.padded_vocab(tp) // tp * model.hidden_size
    sizes[0] += embedding
    sizes[-1] += model.hidden_size
    if parallel.pp > 1 or not model.tied_embeddings:
        sizes[-1] += embedding
    return sizes


def num_parameters(model: HfConfig) -> int:
    """Parameters of the whole model, as transformers counts them."""
    padding = (model.padded_vocab(1) - model.vocab_size) * model.hidden_size
    return stage_parameters(model, ParallelSection())[0] + stage_experts(model, ParallelSection())[0] - padding


def num_active_parameters(model: HfConfig) -> int:
    """Parameters that one token goes through: of each mixture, the experts it is sent to."""
    everything = stage_experts(model, ParallelSection())[0]
    used = everything * model.experts.per_token // model.experts.count if model.experts else 0
    return num_parameters(model) - everything + used


# ------------------------------------------------------------------------------------------------------------------- the memory


def trainer_memory(config: RunConfig, model: HfConfig, dp: int) -> dict[str, dict[str, float]]:
    """Phase -> part -> GiB of the trainer, on the rank of the pipeline stage that needs most. `auto` precision is taken as bf16."""
    stages = range(config.parallel.pp)
    return max((_stage_memory(config, model, dp, stage) for stage in stages), key=lambda memory: sum(memory["train"].values()))


def _stage_memory(config: RunConfig, model: HfConfig, dp: int, stage: int) -> dict[str, dict[str, float]]:
    p, train = config.parallel, config.train
    outside, experts = stage_parameters(model, p)[stage], stage_experts(model, p)[stage]
    parameters = outside + experts
    copies, expert_copies = dp * p.cp, max(1, dp * p.cp * p.tp // (p.ep * p.expert_tp))
    weight_bytes = 4 if config.model.precision == "fp32" else 2
    optimizer_bytes = 8 if weight_bytes == 4 else 12  # two moments, and master weights beside bf16
    resident = {
        "weights": parameters * weight_bytes,
        "gradients": parameters * 4,
        "optimizer": (outside / copies + experts / expert_copies if train.distributed_optimizer else parameters) * optimizer_bytes,
        "reference": parameters * weight_bytes if config.algorithm.beta else 0,
    }
    tokens = train.max_tokens_per_micro_batch / p.cp
    one_layer, kept = (elements * tokens * weight_bytes for elements in _activation_elements(config, model))
    if p.vpp > 1:  # interleaved 1F1B: chunks of layers / (pp vpp) whose backward is still to come
        in_flight = (2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1) / p.vpp
    else:
        in_flight = p.pp - stage
    activations = len(layers_of_ranks(model, p)[stage]) * kept * in_flight + (one_layer if config.model.recompute == "full" else 0)
    logprobs, train_step, ref_hidden = _head_bytes(config, model, dp, weight_bytes) if stage == p.pp - 1 else (0, 0, 0)
    phases = {
        "generate": resident,
        "logprobs": resident | {"activations": one_layer, "logits": logprobs, "ref_hidden": ref_hidden},
        "train": resident | {"activations": activations, "logits": train_step, "ref_hidden": ref_hidden},
    }
    return {phase: {part: size / GIB for part, size in parts.items()} for phase, parts in phases.items()}


def _head_bytes(config: RunConfig, model: HfConfig, dp: int, weight_bytes: int) -> tuple[float, float, float]:
    """Bytes that the LM head takes for log-probs, that it takes in a train step, and that exact KL keeps of the reference for a whole step.

    Logits of a chunk of tokens, in float32; with exact KL of both models. In a train step also the gradient of the head, summed in float32
    and then cast.
    """
    cp, algorithm, rollout = config.parallel.cp, config.algorithm, config.rollout
    exact = algorithm.beta > 0 and algorithm.full_kl
    tokens, shard = config.train.max_tokens_per_micro_batch // cp, model.padded_vocab(config.parallel.tp) // config.parallel.tp
    logits = min(config.train.logprob_chunk, tokens) * shard * 4 * (2 if exact else 1)
    gradients = shard * model.hidden_size * (4 if weight_bytes == 4 else 4 + weight_bytes)
    responses = rollout.prompts_per_step * rollout.num_generations * rollout.max_completion_length / dp / cp
    return logits, logits + gradients, responses * model.hidden_size * weight_bytes if exact else 0


def _activation_elements(config: RunConfig, model: HfConfig) -> tuple[float, float]:
    """(elements that one layer keeps per token without recomputation, with the configured one).

    The residual and the normed input of attention and of the MLP; q, k, v and the attention output; gate, up, silu and their product.
    A token that goes through k experts has k MLPs, each with a copy of its input and output, spread evenly over the ranks.
    """
    tp = config.parallel.tp
    shards = tp if config.parallel.sequence_parallel else 1
    attention = model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads) / tp
    mlp = 4 * model.intermediate_size / tp
    if model.experts:
        sent = model.experts.per_token / tp * (4 * model.experts.intermediate_size + 2 * model.hidden_size)
        mixed = len(model.experts.blocks) / model.num_layers
        mlp = mixed * sent + (1 - mixed) * mlp
    everything = 4 * model.hidden_size / shards + attention + mlp
    return everything, model.hidden_size / shards if config.model.recompute == "full" else everything


def kv_bytes_per_token(model: HfConfig, tp: int) -> int:
    """Bytes of one token in the KV cache of one vLLM device, 2 per element; heads are copied when there are fewer than devices."""
    return 2 * 2 * model.num_layers * model.head_dim * max(1, model.num_kv_heads // tp)


def _smallest_gpu(config: RunConfig, model: HfConfig, memory: dict[str, dict[str, float]]) -> float:
    """GiB of a GPU where the trainer fits beside vLLM's share, and the share holds vLLM's weights and one sequence."""
    share = config.rollout.gpu_memory_utilization
    trainer = max(sum(parts.values()) for parts in memory.values())
    tp = config.rollout.tp
    engine = (2 * num_parameters(model) / tp + config.rollout.max_model_len * kv_bytes_per_token(model, tp)) / GIB
    return max(trainer / (1 - share) if share < 1 else float("inf"), engine / share)


# ----------------------------------------------------------------------------------------------------------------- the problems


def _layout_problems(config: RunConfig, world_size: int) -> list[str]:
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
    longest, budget, align = config.rollout.max_model_len, config.train.max_tokens_per_micro_batch, p.micro_batch_align
    if budget // align * align < longest <= budget:
        factors = " x ".join(["2 x parallel.cp"] * (p.cp > 1) + ["parallel.tp"] * p.sequence_parallel)
        problems.append(
            f"train.max_tokens_per_micro_batch: {budget} is cut to {budget // align * align}, a multiple of {factors} = {align}, "
            f"and the longest sample has {longest} tokens; use {ceil(longest / align) * align}"
        )
    return problems


def _multiples(of: int, near: int) -> list[int]:
    """The positive multiples of `of` on both sides of `near`."""
    below = near // of * of
    return [n for n in (below, below + of) if n]


def _expert_problems(config: RunConfig, model: HfConfig) -> list[str]:
    p, coefficient = config.parallel, config.algorithm.router_aux_loss_coef
    if model.experts and p.tp > 1 and not p.sequence_parallel:
        return [f"parallel.sequence_parallel: {model.family} has experts, which with parallel.tp={p.tp} need it; set it to true"]
    if coefficient and not model.experts:
        return [f"algorithm.router_aux_loss_coef: {coefficient:g}, but {model.family} has no experts; set it to 0"]
    return []


def _reward_problems(config: RunConfig) -> list[str]:
    problems = []
    for i, reward in enumerate(config.rewards.functions):
        if ".py:" in reward.function:
            continue  # its folder is known when the run starts
        try:
            registry.resolve(reward.function)
        except ValueError as error:
            problems.append(str(error).replace("rewards.functions:", f"rewards.functions.{i}.function:", 1))
    return problems


def _rollout_problems(config: RunConfig, model: HfConfig) -> list[str]:
    r, problems = config.rollout, []
    valid = [tp for tp in range(1, model.num_heads + 1) if _vllm_can_split(model, tp)]
    if not r.urls and r.tp not in valid:
        problems.append(
            f"rollout.tp: vLLM cannot split {model.num_heads} heads, {model.num_kv_heads} KV heads and intermediate_size="
            f"{' and '.join(map(str, _mlp_widths(model)))} over tp={r.tp}; valid tp: {', '.join(map(str, valid))}"
        )
    if r.max_model_len > model.max_positions:
        problems.append(
            f"rollout.max_completion_length: max_prompt_length {r.max_prompt_length} + max_completion_length {r.max_completion_length} = "
            f"{r.max_model_len} tokens, but the model ends at {model.max_positions} (max_position_embeddings); shorten by "
            f"{r.max_model_len - model.max_positions}"
        )
    needed = r.max_model_len * kv_bytes_per_token(model, r.tp) / GIB
    if not r.urls and needed > r.kv_cache_gb:
        problems.append(
            f"rollout.kv_cache_gb: {r.kv_cache_gb:g} cannot hold one sequence of {r.max_model_len} tokens; "
            f"use {ceil(needed * 10) / 10:g} or more"
        )
    return problems


def _vllm_can_split(model: HfConfig, tp: int) -> bool:
    whole = not any(size % tp for size in (model.num_heads, *_mlp_widths(model)))
    return whole and (model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0)


def _mlp_widths(model: HfConfig) -> list[int]:
    everywhere = all(map(model.has_experts, range(model.num_layers)))
    return ([] if everywhere else [model.intermediate_size]) + ([model.experts.intermediate_size] if model.experts else [])


def _too_big(config: RunConfig, memory: dict[str, dict[str, float]], smallest: float, gpu: float) -> str:
    r = config.rollout
    trainer = max(sum(parts.values()) for parts in memory.values())
    room = (gpu - trainer) / gpu
    if room > 0.05:
        fix = f"lower it to {int(room * 100) / 100:g} or raise rollout.tp" if room < r.gpu_memory_utilization else "raise it or rollout.tp"
    else:
        fix = "raise parallel.tp, parallel.pp or parallel.cp, lower train.max_tokens_per_micro_batch, or set model.recompute=full"
    return (
        f"rollout.gpu_memory_utilization: a trainer rank of {trainer:.1f} GiB and vLLM's {r.gpu_memory_utilization:g} of the GPU need "
        f"{smallest:.1f} GiB, and it has {gpu:g}; {fix}"
    )


# --------------------------------------------------------------------------------------------------------------------- the text


def _model_text(path: str, model: HfConfig) -> str:
    embeddings = "tied" if model.tied_embeddings else "untied"
    active = f" ({num_active_parameters(model) / 1e6:,.1f}M active)" if model.experts else ""
    return (
        f"{path}: {model.family}, {num_parameters(model) / 1e6:,.1f}M parameters{active}, {model.num_layers} layers, "
        f"{model.num_heads} heads, {model.num_kv_heads} KV heads, {embeddings} embeddings"
    )


def _experts_text(config: RunConfig, model: HfConfig, world_size: int) -> str:
    p, experts = config.parallel, model.experts
    return (
        f"{experts.count} in {len(experts.blocks)} layers, {experts.per_token} a token; the ranks of a stage = etp {p.expert_tp} x "
        f"ep {p.ep} x {max(1, world_size // p.expert_parallel_size)} copies, {experts.count // p.ep} experts on each"
    )


def _rollout_text(config: RunConfig) -> str:
    r = config.rollout
    if r.urls:
        return f"{len(r.urls)} vLLM server(s) that run already, up to {r.max_model_len} tokens a sequence"
    return (
        f"{r.servers} vLLM server(s) x tp {r.tp}, up to {r.max_model_len} tokens a sequence; each takes {r.gpu_memory_utilization:.0%} "
        f"of a GPU's memory, or weights + {r.kv_cache_gb:g} GiB of RAM"
    )


def _step_text(config: RunConfig, dp: int) -> str:
    r, t = config.rollout, config.train
    samples = r.prompts_per_step * r.num_generations
    tokens = samples * r.max_model_len
    per_rank = max(config.parallel.pp, ceil(tokens / dp / t.max_tokens_per_micro_batch))
    return (
        f"{r.prompts_per_step} prompts x {r.num_generations} generations = {samples} samples, at most {tokens:,} tokens = "
        f"{per_rank} micro-batch(es) of {t.max_tokens_per_micro_batch:,} on each of {dp} data-parallel rank(s)"
    )


def _memory_table(memory: dict[str, dict[str, float]]) -> Sequence[str]:
    parts = [part for part in memory["train"] if any(phase.get(part) for phase in memory.values())]
    parts = [part for part in parts if part != "total"] + ["total"]
    lines = ["trainer, GiB on the fullest rank", "".join([f"{'':<10}", *(f"{part:>13}" for part in parts)])]
    for phase, sizes in memory.items():
        lines.append("".join([f"{phase:<10}", *(f"{sizes.get(part, 0):13.2f}" for part in parts)]))
    return lines
