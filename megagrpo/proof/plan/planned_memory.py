"""Predicts the memory of a trainer rank and of a vLLM server from shapes.

Weights, gradients and optimizer state are exact. Activations are an estimate (the tensors that the backward pass
keeps). Kernels' workspaces are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megagrpo.config import RunConfig
from megagrpo.config.training import FUSED_SCRATCH_BYTES
from megagrpo.models.families.hf_config import HfConfig
from megagrpo.proof.plan.shapes import (
    expert_parameters,
    largest_chunks,
    layers_of_ranks,
    num_parameters,
    stage_adapters,
    stage_experts,
    stage_fp8,
    stage_linears,
    stage_parameters,
)

GIB = 2**30
PREFILL_TOKENS = 8192  # tokens in one prefill batch of vLLM, its default on large GPUs
# bytes of both moments of a parameter, with their share of two scales
MOMENT_BYTES = {"fp32": 8, "bf16": 4, "fp8": 2 + 8 / 256}
FP8_BYTES = 2  # bytes of a weight's cached FP8 copies: one rounded along rows, one along columns
# layers whose activations stay on the GPU despite model.offload_activations: the running one and its neighbour
NOT_OFFLOADED = 2
STORED_BYTES = {"fp8": 1 + 4 / 64, "nf4": 1 / 2 + 4 / 64}  # bytes of a stored weight, with its share of a scale


def trainer_memory(config: RunConfig, model: HfConfig, dp: int, gpu: bool = True) -> dict[str, dict[str, float]]:
    """Return phase -> part -> GiB of the trainer, each phase on the rank of the pipeline stage that needs most."""
    stages = stage_memory(config, model, dp, gpu)
    return {
        phase: max((stage[phase] for stage in stages), key=lambda parts: sum(parts.values())) for phase in stages[0]
    }


def stage_memory(config: RunConfig, model: HfConfig, dp: int, gpu: bool = True) -> list[dict[str, dict[str, float]]]:
    """Return, per pipeline stage, phase -> part -> GiB of one rank. `auto` precision counts as bf16.

    Without a `gpu` attention is our torch version, which keeps more activations.
    """
    p = config.parallel
    in_fp8 = stage_fp8(model, p, config.model.bf16_layers) if config.model.fp8_recipe != "none" else [0] * p.pp
    layers, outside, experts = layers_of_ranks(model, p), stage_parameters(model, p), stage_experts(model, p)
    adapters, linears, chunks = stage_adapters(model, p, config.lora), stage_linears(model, p), largest_chunks(model, p)
    stages = [
        _Stage(i, layers[i], outside[i], experts[i], adapters[i], linears[i], chunks[i], in_fp8[i]) for i in range(p.pp)
    ]
    return [_stage_memory(config, model, dp, stage, gpu) for stage in stages]


@dataclass(frozen=True)
class _Stage:
    """A pipeline stage: its index, the indices of its layers, and parameter counts on one of its ranks."""

    index: int
    layers: list[int]
    outside: int  # parameters that belong to no expert
    experts: int
    adapters: int
    linears: int
    chunk: int  # of the largest buffer of gradients
    in_fp8: int


def weight_bytes(config: RunConfig) -> int:
    """Return the bytes of one weight in the trainer; `auto` precision counts as bf16."""
    return 4 if config.model.precision == "fp32" else 2


def _stage_memory(config: RunConfig, model: HfConfig, dp: int, stage: _Stage, gpu: bool) -> dict[str, dict[str, float]]:
    """Return phase -> part -> GiB of one rank of a stage."""
    p, train, in_fp8 = config.parallel, config.train, stage.in_fp8
    parameters = stage.outside + stage.experts + stage.adapters
    trained, trained_experts = (stage.adapters, 0) if config.lora.enabled else (stage.outside, stage.experts)
    copies, expert_copies = dp * p.cp, max(1, dp * p.cp * p.tp // (p.ep * p.expert_tp))
    element = weight_bytes(config)
    sent = num_parameters(model) * element / (dp * p.model_parallel_size)  # in a weight sync
    # Muon keeps one moment of a matrix. The embeddings' second moment is ignored.
    moment_bytes = 0 if train.optimizer_offload else MOMENT_BYTES[train.optimizer_state_dtype]
    moment_bytes = 4 if train.optimizer == "muon" else moment_bytes
    optimizer_bytes = moment_bytes + (0 if element == 4 else 4)  # bf16 weights have float32 masters
    stored = 0 if config.model.base_storage == "none" else stage.linears
    saved = in_fp8 * (element - (FP8_BYTES if gpu else 1)) if config.model.fp8_param else 0
    whole = trained + trained_experts
    sharded = trained / copies + trained_experts / expert_copies if train.distributed_optimizer else whole
    resident = {
        "weights": (parameters - stored) * element + stored * STORED_BYTES.get(config.model.base_storage, 0) - saved,
        "gradients": whole * 4,
        "optimizer": optimizer_bytes * sharded,
        "reference": whole * element - saved if config.algorithm.beta else 0,
    }
    if gpu and in_fp8 and not config.model.fp8_param:
        resident["fp8_weights"] = in_fp8 * FP8_BYTES
    tokens = train.max_tokens_per_micro_batch / p.cp
    kept = activation_elements(config, model, gpu)
    one_layer, stored_layer, passing = (elements * tokens * element for elements in kept)
    stored_layers = len(stage.layers) * in_flight(config, stage.index)
    if gpu:
        stored_layers -= max(0.0, stored_layers - NOT_OFFLOADED) * config.model.offload_activations
    activations = stored_layers * stored_layer + passing + (one_layer if config.model.recompute == "full" else 0)
    logprobs, train_step, ref_hidden = _head_bytes(config, model, dp, element) if stage.index == p.pp - 1 else (0, 0, 0)
    # load: moments do not exist before the first step, and the sharded optimizer copies weights to its buffers before
    # masters exist.
    # sync: a rank copies the bytes that it sends out of its weights first.
    largest = model.padded_vocab(p.tp) // p.tp * model.hidden_size * element
    masters = resident["optimizer"] * (optimizer_bytes - moment_bytes) / optimizer_bytes
    moved = min(stage.chunk, max(trained, trained_experts)) * element if train.distributed_optimizer else 0
    loading = {"optimizer": masters, "staging": max(largest, moved - masters)}
    phases = {
        "load": resident | loading,
        "generate": resident,
        "logprobs": resident | {"activations": passing, "logits": logprobs, "ref_hidden": ref_hidden},
        "train": resident | {"activations": activations, "logits": train_step, "ref_hidden": ref_hidden},
        "sync": resident | {"staging": sent},
    }
    return {phase: {part: size / GIB for part, size in parts.items()} for phase, parts in phases.items()}


def in_flight(config: RunConfig, stage: int) -> float:
    """Return a stage's peak number of micro-batches, counted with all its layers, whose backward pass has not run."""
    p = config.parallel
    if p.vpp > 1:  # interleaved 1F1B: chunks of layers / (pp vpp)
        return (2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1) / p.vpp
    return p.pp - stage


def _head_bytes(config: RunConfig, model: HfConfig, dp: int, weight_bytes: int) -> tuple[float, float, float]:
    """Return the LM head's bytes for log-probs, its bytes in a train step, and the bytes that exact KL keeps of the
    reference for a whole step.

    They hold a chunk's logits in float32: with exact KL the logits of both models, with top-p also the exponentials.
    Fused log-probs write no logits without gradients; with gradients they write 2 bytes each to scratch of limited
    size. A train step adds the head's gradient, summed in float32 and then cast.
    """
    cp, algorithm, rollout, train = config.parallel.cp, config.algorithm, config.rollout, config.train
    exact = algorithm.beta > 0 and algorithm.full_kl
    tokens, shard = train.max_tokens_per_micro_batch // cp, model.padded_vocab(config.parallel.tp) // config.parallel.tp
    if train.fused_logprobs:
        passing = (tokens + shard) * model.hidden_size if train.logprobs_fp8_recipe != "none" else 0
        retained = passing + min(FUSED_SCRATCH_BYTES, tokens * shard * weight_bytes)
    else:
        passing = retained = min(train.logprob_chunk, tokens) * shard * 4 * (1 + exact + (rollout.top_p < 1))
    gradients = shard * model.hidden_size * (4 if weight_bytes == 4 else 4 + weight_bytes)
    responses = rollout.prompts_per_step * rollout.num_generations * config.max_response_length / dp / cp
    return passing, retained + gradients, responses * model.hidden_size * weight_bytes if exact else 0


def activation_elements(config: RunConfig, model: HfConfig, gpu: bool) -> tuple[float, float, float]:
    """Return elements per token of a layer: kept without recompute, kept as configured, and temporary in its MLP pass.

    Attention and MLP each keep the residual, the normed input, and their output if it is normalised too. Attention
    keeps q, k and v as one tensor, q and k again after rotation, and its output. Our CPU attention, above 128 tokens,
    keeps copies of q, of k and v for every query head, and the output twice; q, k and v themselves only if normalised.
    Our GPU attention keeps q, k and v as the kernel takes them, and the output twice; with normalised q and k also q, k
    and v as one tensor, and a copy of q. Latents are kept before and after their norm.

    The MLP keeps gate, up and silu(gate) up. On a GPU without the fusion `bias_activation` of `model.fusions` it also
    keeps silu(gate) and a copy of up. A token that uses k experts has k MLPs, each with a copy of its input, spread
    evenly over the ranks. An expert also keeps its activation before it is weighted, unless both are fused. All
    experts' outputs exist at once during the pass and are not kept. With an adapter the outputs of the projection, of
    the adapter and their sum exist at once.
    """
    tp = config.parallel.tp
    shards = tp if config.parallel.sequence_parallel else 1
    queries, keys = model.num_heads * model.head_dim / tp, model.num_kv_heads * model.head_dim / tp
    if model.mla:
        attention = (model.head_dim + model.value_dim) * (model.num_heads + model.num_kv_heads) / tp
        attention += (2 * ((model.mla.query_rank or 0) + model.mla.kv_rank) + model.mla.rope_dim) / shards
    elif gpu and own_attention(config, model):
        attention = 3 * queries + 2 * keys + (2 * queries + 2 * keys if model.qk_norm else 0)
    elif gpu:
        attention = 3 * queries + 3 * keys
    else:
        attention = 5 * queries + (queries + 2 * keys if model.qk_norm else 0)
    unfused = gpu and "bias_activation" not in config.model.fusions
    inside = 5 if unfused else 3
    mlp = inside * model.intermediate_size / tp
    if model.experts:
        routed = 6 if unfused else 3 if gpu else 4
        sent = model.experts.per_token / tp * (routed * model.experts.intermediate_size + model.hidden_size)
        sent += inside * model.experts.shared_size / tp
        mixed = len(model.experts.blocks) / model.num_layers
        mlp = mixed * sent + (1 - mixed) * mlp
    everything = (6 if model.post_norms else 4) * model.hidden_size / shards + attention + mlp
    stored = model.hidden_size / shards if config.model.recompute == "full" else everything
    beside = 4 * model.intermediate_size / tp if config.lora.enabled else 0
    return everything, stored, 2 * model.hidden_size / shards + mlp + expert_output_elements(model, tp) + beside


def expert_output_elements(model: HfConfig, tp: int) -> float:
    """Return elements per token of expert outputs before their sum, averaged over all layers; 0 without experts."""
    if model.experts is None:
        return 0.0
    return len(model.experts.blocks) / model.num_layers * model.experts.per_token / tp * model.hidden_size


def own_attention(config: RunConfig, model: HfConfig) -> bool:
    """Whether a Hopper GPU uses our attention, not Transformer Engine's: in deterministic runs, with capped scores."""
    return config.run.deterministic or model.score_cap is not None


def kv_elements(model: HfConfig, tp: int, tokens: int, prefill: int | None = None) -> int:
    """Return the KV cache elements of one sequence of `tokens` tokens on one of `tp` vLLM devices.

    A device keeps at least one whole head; with latent attention it keeps the whole latent. For a layer with a window
    vLLM keeps the tokens that a token sees before its own, and up to `prefill` tokens of the current batch. `prefill`
    None: it keeps all tokens, as when whole prompts are one batch.
    """
    element = 2 * model.head_dim * max(1, model.num_kv_heads // tp)
    element = model.mla.kv_rank + model.mla.rope_dim if model.mla else element
    windows = [model.window(layer) for layer in range(model.num_layers)]
    seen = (tokens if window is None or prefill is None else min(tokens, window - 1 + prefill) for window in windows)
    return element * sum(seen)


def kv_bytes(config: RunConfig, model: HfConfig, tokens: int, prefill: int | None = None) -> int:
    """Return the KV cache bytes of one sequence on one of the run's vLLM devices: `kv_elements` in vLLM's compute
    dtype, of the layers of the largest pipeline stage."""
    whole = engine_element(config) * kv_elements(model, config.rollout.tp, tokens, prefill)
    return ceil(whole * ceil(model.num_layers / config.rollout.pp) / model.num_layers)


def engine_element(config: RunConfig) -> int:
    """Return the bytes of one element in vLLM's compute dtype: 2 with quantized weights, else as in the trainer."""
    return weight_bytes(config) if config.rollout.quantization == "none" else 2


def block_bytes(config: RunConfig) -> int:
    """Return the bytes of one element of a block's linears in vLLM, without FP8's scales, which are a thousandth."""
    return engine_element(config) if config.rollout.quantization == "none" else 1


def engine_bytes(config: RunConfig, model: HfConfig) -> int:
    """Return the bytes of the whole model in vLLM. vLLM quantizes only the blocks, not embedding and output layer."""
    outer = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return engine_element(config) * outer + block_bytes(config) * (num_parameters(model) - outer)


def device_bytes(config: RunConfig, model: HfConfig) -> float:
    """Return the bytes of the weights on the fullest device of a vLLM server.

    The first and the last pipeline stage hold the embedding and the output layer besides their blocks. Data-parallel
    copies share the experts only.
    """
    r = config.rollout
    experts, every = float(block_bytes(config) * expert_parameters(model)), float(engine_bytes(config, model))
    outer = engine_element(config) * model.vocab_size * model.hidden_size
    if r.pp > 1:
        share = ceil(model.num_layers / r.pp) / model.num_layers
        experts = experts * share
        every = outer + (every - outer * (1 if model.tied_embeddings else 2)) * share
    return (every - experts + experts / r.dp) / r.tp


def reload_bytes(config: RunConfig, model: HfConfig) -> float:
    """Return the bytes that a weight sync needs on each of a server's GPUs beside vLLM's weights and cache.

    vLLM's reload allocates one module at a time in the compute dtype, fills it, quantizes it to a new tensor and copies
    that to the weights. The largest module is an embedding, an MLP's gate and up, or all experts of a layer.
    """
    tp, hidden, element = config.rollout.tp, model.hidden_size, engine_element(config)
    quantized = element if config.rollout.quantization == "none" else element + block_bytes(config)
    experts = 3 * model.experts.intermediate_size * model.experts.count if model.experts else 0
    mlp = 2 * model.intermediate_size * quantized
    return max(model.vocab_size * element, mlp, experts / config.rollout.dp * quantized) * hidden / tp


def engine_memory(config: RunConfig, model: HfConfig, gpu: float | None = None) -> dict[str, float]:
    """Return the GiB of weights and KV cache of a vLLM server on each of its GPUs.

    The cache gets the rest of the server's share of `gpu` GiB. With `gpu` None it is the minimum: one longest sequence.
    """
    weights = device_bytes(config, model) / GIB
    least = kv_bytes(config, model, config.max_model_len, PREFILL_TOKENS) / GIB
    rest = least if gpu is None else config.rollout.gpu_memory_utilization * gpu - weights
    return {"vllm_weights": weights, "kv_cache": max(0.0, rest)}


def takes_turns(config: RunConfig) -> bool:
    """Whether trainer and vLLM use a GPU's memory in turns: vLLM sleeps during training, the trainer offloads during
    generation (`train.offload`)."""
    return config.rollout.placed == "colocated" and config.train.offload is not False


def on_shared_gpu(
    config: RunConfig, memory: dict[str, dict[str, float]], engine: dict[str, float], reload: float
) -> dict[str, dict[str, float]]:
    """Return the phases of a GPU that a trainer rank shares with a server, which holds `engine` while it generates.

    If they take turns, the trainer is offloaded by then. While vLLM loads weights, only the trainer's weights are on
    the GPU. The staging of a weight sync includes the module that vLLM reloads, `reload` GiB.
    """
    staging = {"staging": memory["sync"]["staging"] + reload}
    if not takes_turns(config):
        return memory | {"generate": memory["generate"] | engine, "sync": memory["sync"] | staging}
    trainer = {"weights": memory["sync"]["weights"]} | staging
    return memory | {"generate": engine, "sync": trainer | {"vllm_weights": engine["vllm_weights"]}}


def smallest_gpu(config: RunConfig, model: HfConfig, memory: dict[str, dict[str, float]]) -> float:
    """Return the GiB that a GPU needs for the trainer and vLLM.

    A shared GPU without turns holds both at once. A started server's share must hold vLLM's weights and one sequence.
    The rest of the GPU must hold a module that vLLM reloads, if weights arrive while the server has its cache.
    """
    rollout, engine = config.rollout, engine_memory(config, model)
    share, turns, reload = rollout.gpu_memory_utilization, takes_turns(config), reload_bytes(config, model) / GIB
    beside = on_shared_gpu(config, memory, engine, reload) if turns else memory
    if rollout.placed == "colocated" and not turns:
        beside = memory | {"sync": memory["sync"] | {"staging": memory["sync"]["staging"] + reload}}
    trainer = max(sum(parts.values()) for parts in beside.values())
    if rollout.placed == "external":
        return trainer
    if rollout.placed == "colocated" and not turns:
        trainer = trainer / (1 - share) if share < 1 else float("inf")
    rest = reload / (1 - share) if rollout.placed == "dedicated" and share < 1 else 0.0
    return max(trainer, sum(engine.values()) / share, rest)
