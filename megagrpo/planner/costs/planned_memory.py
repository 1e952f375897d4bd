"""Predicts the memory of trainer ranks from shapes, on the GPU and on the host, alone and beside a vLLM server.

Weights, gradients and optimizer state are exact. Activations are an estimate (the tensors that the backward pass
keeps). Kernels' workspaces are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megagrpo.config import RunConfig
from megagrpo.config.sections.training import FUSED_SCRATCH_BYTES
from megagrpo.families.hf_config import HfConfig
from megagrpo.families.shared.recurrence import Mamba2
from megagrpo.planner.costs.engine_memory import GIB, ServerMemory
from megagrpo.planner.costs.gpu_specs import GPUS_PER_NODE
from megagrpo.planner.costs.shapes import Stage, layer_route_bytes, num_parameters, stages_of
from megagrpo.planner.costs.teacher_costs import critic_memory, teacher_memory
from megagrpo.planner.costs.tower_costs import tower_activations, tower_bytes, tower_shape
from megagrpo.planner.costs.workload import Bundle, responses_together, step_samples

# bytes of both moments of a parameter, with their share of two scales
MOMENT_BYTES = {"fp32": 8, "bf16": 4, "fp8": 2 + 8 / 256}
FP8_BYTES = 2  # bytes of a weight's cached FP8 copies: one rounded along rows, one along columns
# layers whose activations stay on the GPU despite model.offload_activations: the running one and its neighbour
NOT_OFFLOADED = 2
STORED_BYTES = {"fp8": 1 + 4 / 64, "nf4": 1 / 2 + 4 / 64}  # bytes of a stored weight, with its share of a scale
MOVED = ("weights", "optimizer", "reference", "teachers", "critic")  # to the host while vLLM generates


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
    stages = _stages(config, model)
    sent = num_parameters(model) * config.model.weight_bytes / (dp * config.parallel.model_parallel_size)
    kept = activation_elements(config, model, gpu)
    return [_stage_memory(config, model, dp, stage, gpu, sent, kept) for stage in stages]


def _stages(config: RunConfig, model: HfConfig) -> list[Stage]:
    bf16_layers = None if config.model.fp8_recipe == "none" else config.model.bf16_layers
    stages = stages_of(model, config.parallel, config.lora, bf16_layers)
    if config.towers == "trained" and (tower := tower_shape(config, model)):
        stages[0] = replace(stages[0], outside=stages[0].outside + tower.parameters)
    return stages


def _stage_memory(
    config: RunConfig, model: HfConfig, dp: int, stage: Stage, gpu: bool, sent: float, kept: tuple[float, float, float]
) -> dict[str, dict[str, float]]:
    """Return phase -> part -> GiB of one rank of a stage, which sends `sent` bytes in a weight sync and keeps these
    `activation_elements`."""
    p, train, in_fp8 = config.parallel, config.train, stage.in_fp8
    parameters = stage.outside + stage.experts + stage.adapters + stage.expert_adapters
    trained, trained_experts = _trained(config, stage)
    copies, expert_copies = dp * p.cp, max(1, dp * p.cp * p.tp // (p.ep * p.expert_tp))
    element = config.model.weight_bytes
    # Muon keeps one moment of a matrix. The embeddings' second moment is ignored.
    moment_bytes = 0 if train.optimizer_offload else MOMENT_BYTES[train.optimizer_state_dtype]
    moment_bytes = 4 if train.optimizer == "muon" else moment_bytes
    master_bytes = 0 if element == 4 else 4  # bf16 weights have float32 masters
    stored = 0 if config.model.base_storage == "none" else stage.linears
    saved = in_fp8 * (element - (FP8_BYTES if gpu else 1)) if config.model.fp8_param else 0
    whole = trained + trained_experts
    sharded = trained / copies + trained_experts / expert_copies if train.distributed_optimizer else whole
    resident = {
        "weights": (parameters - stored) * element + stored * STORED_BYTES.get(config.model.base_storage, 0) - saved,
        "gradients": whole * 4,
        "optimizer": (moment_bytes + master_bytes) * sharded,
        "reference": whole * element - saved if config.algorithm.has_reference else 0,
    }
    if config.lora.enabled and config.model.reference_path is not None:
        resident["reference"] = resident["weights"]
    resident |= critic_memory(config, stage, sum(resident[part] for part in ("weights", "gradients", "optimizer")))
    teachers, teacher_hidden = teacher_memory(config, model, stage.index, _responses(config, dp))
    resident |= teachers
    if tower := tower_bytes(config, model, stage):
        resident["tower"] = tower
    if gpu and in_fp8 and not config.model.fp8_param:
        resident["fp8_weights"] = in_fp8 * FP8_BYTES
    tokens = train.max_tokens_per_micro_batch / p.cp
    one_layer, stored_layer, passing = (elements * tokens * element for elements in kept)
    stored_layers = len(stage.layers) * in_flight(config, stage.index)
    if gpu:
        stored_layers -= max(0.0, stored_layers - NOT_OFFLOADED) * config.model.offload_activations
    activations = stored_layers * stored_layer + passing + (one_layer if config.model.recompute == "full" else 0)
    activations += tower_activations(config, model) if stage.index == 0 else 0
    logprobs, train_step, ref_hidden = _head_bytes(config, model, dp, element) if stage.index == p.pp - 1 else (0, 0, 0)
    # load: moments do not exist before the first step, and the sharded optimizer copies weights to its buffers before
    # masters exist.
    # sync: a rank copies the bytes that it sends out of its weights first.
    largest = model.padded_vocab(p.tp) // p.tp * model.hidden_size * element
    masters = master_bytes * sharded
    moved = min(stage.chunk, max(trained, trained_experts)) * element if train.distributed_optimizer else 0
    loading = {"optimizer": masters, "staging": max(largest, moved - masters)}
    batch = {"ref_hidden": ref_hidden + teacher_hidden}
    if routes := _route_bytes(config, model, dp, stage, gpu):
        batch["routes"] = routes
    phases = {
        "load": resident | loading,
        "generate": resident,
        "logprobs": resident | {"activations": passing, "logits": logprobs} | batch,
        "train": resident | {"activations": activations, "logits": train_step} | batch,
        "sync": resident | {"staging": sent},
    }
    return {phase: {part: size / GIB for part, size in parts.items()} for phase, parts in phases.items()}


def _route_bytes(config: RunConfig, model: HfConfig, dp: int, stage: Stage, gpu: bool) -> float:
    """Return the bytes of replayed routes on the device of a rank of a stage, if all samples have full length.

    Recorded routes stay there until the step ends. Those of the engine stay in host memory, and are
    copied to a GPU for one optimizer step.
    """
    p, rollout, algorithm = config.parallel, config.rollout, config.algorithm
    samples = step_samples(config) / dp
    if rollout.routing_replay == "off" or not model.experts:
        return 0.0
    if rollout.routing_replay == "engine":
        samples = samples / algorithm.steps_per_generation if gpu else 0.0
    tokens = samples * config.max_model_len / p.cp / (p.tp if p.sequence_parallel else 1)
    return tokens * sum(map(model.has_experts, stage.layers)) * layer_route_bytes(model)


def in_flight(config: RunConfig, stage: int) -> float:
    """Return a stage's peak number of micro-batches, counted with all its layers, whose backward pass has not run."""
    p, beside = config.parallel, int("experts" in config.train.overlap)  # a backward pass needs another forward pass
    if p.vpp > 1:  # interleaved 1F1B: chunks of layers / (pp vpp)
        return (2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1 + beside) / p.vpp
    return p.pp - stage + beside


def _head_bytes(config: RunConfig, model: HfConfig, dp: int, weight_bytes: int) -> tuple[float, float, float]:
    """Return the LM head's bytes for log-probs, its bytes in a train step, and the bytes that exact KL keeps of the
    reference for a whole step.

    They hold a chunk's logits in float32: with exact KL or a teacher the logits of both models, with top-p also the
    exponentials. In a train step with a repetition penalty they also hold the logits' derivatives. Rows may have both.
    Fused log-probs write no logits without gradients; with gradients they write 2 bytes each to scratch of limited
    size. A train step adds the head's gradient, summed in float32 and then cast.
    """
    cp, algorithm, rollout, train = config.parallel.cp, config.algorithm, config.rollout, config.train
    exact = algorithm.beta > 0 and algorithm.full_kl
    compared = exact or any(teacher.over == "vocabulary" for teacher in algorithm.teacher)
    tokens, shard = train.max_tokens_per_micro_batch // cp, model.padded_vocab(config.parallel.tp) // config.parallel.tp
    if train.fused_logprobs:
        passing = (tokens + shard) * model.hidden_size if train.logprobs_fp8_recipe != "none" else 0
        retained = passing + min(FUSED_SCRATCH_BYTES, tokens * shard * weight_bytes)
    else:
        of_chunk = min(train.logprob_chunk, tokens) * shard * 4
        rows = config.has_own_sampling  # a row may have its own top_p and repetition penalty
        passing = of_chunk * (1 + compared + (rollout.top_p < 1 or rows))
        retained = passing + of_chunk * (rollout.repetition_penalty != 1 or rows)
    gradients = shard * model.hidden_size * (4 if weight_bytes == 4 else 4 + weight_bytes)
    return passing, retained + gradients, _responses(config, dp) * model.hidden_size * weight_bytes if exact else 0


def _responses(config: RunConfig, dp: int) -> float:
    """Return the most response tokens of a step on a rank."""
    return step_samples(config) * config.max_response_length / dp / config.parallel.cp


def activation_elements(config: RunConfig, model: HfConfig, gpu: bool) -> tuple[float, float, float]:
    """Return elements per token of a layer: kept without recompute, kept as configured, and temporary in its MLP pass.

    Attention and MLP each keep the residual, the normed input, and their output if it is normalised too. Attention
    keeps q, k and v as one tensor, q and k again after rotation, and its output. Our CPU attention, above 128 tokens,
    keeps copies of q, of k and v for every query head, and the output twice; q, k and v themselves only if normalised.
    Our GPU attention keeps q, k and v as the kernel takes them, and the output twice; with normalised q and k also q, k
    and v as one tensor, and a copy of q. Latents are kept before and after their norm. With more ranks than KV heads,
    the value is a view of the gathered q, k and v of all ranks, which it keeps. Mamba-2 keeps `Mamba2.kept`.

    The MLP keeps gate, up and silu(gate) up. On a GPU without the fusion `bias_activation` of `model.fusions` it also
    keeps silu(gate) and a copy of up. A token that uses k experts has k MLPs, each with a copy of its input, spread
    evenly over the ranks. An expert also keeps its activation before it is weighted, unless both are fused. All
    experts' outputs exist at once during the pass and are not kept. With an adapter the outputs of the projection, of
    the adapter and their sum exist at once.
    """
    tp = config.parallel.tp
    shards = tp if config.parallel.sequence_parallel else 1
    queries, keys = model.num_heads * model.head_dim / tp, model.kv_heads_of_rank(tp) * model.head_dim
    if model.mla:
        attention = (model.head_dim + model.value_dim) * (model.num_heads + model.num_kv_heads) / tp
        attention += (2 * ((model.mla.query_rank or 0) + model.mla.kv_rank) + model.mla.rope_dim) / shards
    elif gpu and own_attention(config, model):
        attention = 3 * queries + 2 * keys + (2 * queries + 2 * keys if model.qk_norm else 0)
    elif gpu:
        attention = 3 * queries + (1 + 2 * repeated_keys(config)) * keys
    else:
        attention = 5 * queries + (queries + 2 * keys if model.qk_norm else 0)
    if tp > model.num_kv_heads:
        attention += (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    if isinstance(model.recurrence, Mamba2):
        kept = len(model.recurrence.blocks) * model.recurrence.kept(4 / config.model.weight_bytes) / tp
        attention = (sum(map(model.has_attention, range(model.num_layers))) * attention + kept) / model.num_layers
    unfused = gpu and "bias_activation" not in config.model.fusions
    inside = (5 if unfused else 3) if model.gated_mlp else 2
    dense = sum(map(model.has_mlp, range(model.num_layers))) / model.num_layers
    mixed = len(model.experts.blocks) / model.num_layers if model.experts else 0
    mlp = (dense - mixed) * inside * model.mean_mlp_width / tp
    if model.experts:
        routed = 6 if unfused else 3 if gpu else 4
        sent = model.experts.per_token / tp * (routed * model.experts.intermediate_size + model.hidden_size)
        sent += inside * model.experts.shared_size / tp
        mlp += mixed * sent
    # of the inputs per layer: rows, projection, norm, sum and its gradient, gate and its product
    vectors = (7 * model.layer_inputs + 2 * model.hidden_size) / shards if model.layer_inputs else 0
    norms = model.layers_per_block * (3 if model.post_norms else 2) * model.hidden_size / shards
    everything = norms + attention + mlp + vectors
    at_entry = (model.hidden_size + 5 * model.layer_inputs) / shards
    stored = at_entry if config.model.recompute == "full" else everything
    beside = 4 * model.intermediate_size / tp if config.lora.enabled else 0
    return everything, stored, 2 * model.hidden_size / shards + mlp + expert_output_elements(model, tp) + beside


def expert_output_elements(model: HfConfig, tp: int) -> float:
    """Return elements per token of expert outputs before their sum, averaged over all layers; 0 without experts."""
    if model.experts is None:
        return 0.0
    return len(model.experts.blocks) / model.num_layers * model.experts.per_token / tp * model.hidden_size


def repeated_keys(config: RunConfig) -> float:
    """Return the keys that Transformer Engine's attention gets per token of a micro-batch of longest samples: with
    shared prompts those of the prompt are repeated for each response."""
    prompt, response = config.rollout.max_prompt_length, config.max_response_length
    bundle = Bundle(prompt, response, responses_together(config, prompt, response))
    return (prompt + response) / bundle.tokens_per_response


def own_attention(config: RunConfig, model: HfConfig) -> bool:
    """Whether a Hopper GPU uses our attention, not Transformer Engine's: in deterministic runs, in float32, with capped
    scores, with sinks (PyTorch 2.13 brings cuDNN 9.20), with images whose tokens see each other, and with windows or
    shared prompts over context-parallel ranks (`build._own_attention`)."""
    beyond_a_ring = any(model.windows) or config.shares_prompts(transformer_engine=True)
    unfused = config.run.deterministic or config.model.precision == "fp32"
    unfused |= model.beyond_fused_attention(config.longest_sequence)
    unfused |= config.data.images and model.vision is not None and model.vision.square is not None
    return unfused or model.sinks or (config.parallel.cp > 1 and beyond_a_ring)


def host_memory(
    config: RunConfig, model: HfConfig, world_size: int, gpu: bool = False, vllm_weights: float = 0.0
) -> dict[str, float]:
    """Return GiB of RAM on the fullest node, by purpose. Python and libraries are not counted. A vLLM server that
    sleeps while the rank on its `gpu` works keeps `vllm_weights` GiB.

    - `saving`: peak while a checkpoint is assembled.
    - `writing`: held until the checkpoint is written while training goes on (0 without `run.async_save`).
    - `moments`: kept there by `train.optimizer_offload`.
    - `offload`: pinned, state that `train.offload` moves there from a `gpu`.
    - `activations`: pinned too, of `model.offload_activations`.

    With a sharded optimizer one of the ranks that share parameters gathers masters and moments in float32
    (`fully_reshardable`), one buffer after the other. Every rank holds its own part of the buffer. The gathering rank
    also holds three whole float32 tensors: the parts as received, the tensor before, and the joined one. gloo itself
    needs about as much as one of them, which is not counted. The gathering rank writes. With `run.async_save` it copies
    weights, masters and moments, otherwise only weights.
    """
    p, stages, ranks = config.parallel, _stages(config, model), []
    turns = gpu and config.takes_turns
    moved = moved_bytes(config, model, world_size) if turns else [0.0] * p.pp
    activations = activation_bytes(config, model) if gpu else [0.0] * p.pp
    asleep = GIB * vllm_weights if turns else 0.0
    # ranks go tp fastest, then cp, dp, pp; a stage's expert ranks go etp fastest, then ep
    for rank in range(world_size):
        stage, index = divmod(rank, world_size // p.pp)
        trained, experts = _trained(config, stages[stage])
        outside = trained, index // p.tp, world_size // (p.pp * p.tp)
        inside = experts, index // (p.expert_tp * p.ep), world_size // p.expert_parallel_size
        purposes = _rank(config, (outside, inside), stages[stage].chunk)
        more = {"offload": moved[stage], "activations": activations[stage]}
        ranks.append(purposes | {"saving": purposes["saving"] + asleep} | more)
    nodes = [ranks[first : first + GPUS_PER_NODE] for first in range(0, world_size, GPUS_PER_NODE)]
    return {name: max(sum(rank[name] for rank in node) for node in nodes) / GIB for name in ranks[0]}


def moved_bytes(config: RunConfig, model: HfConfig, world_size: int) -> list[float]:
    """Return, per stage, the bytes of one rank that wait in host memory while vLLM generates (`train.offload`)."""
    return [sum(parts.values()) for parts in _moved(config, model, world_size)]


def copied_bytes(config: RunConfig, model: HfConfig, world_size: int) -> list[float]:
    """Return, per stage, the bytes of one rank that `train.offload` copies in each step.

    Everything is copied to the GPU. Only state that steps change is copied to the host: under adapters only the
    adapters' weights, and the reference only in the steps that move it.
    """
    a, copied = config.algorithm, []
    for stage, parts in zip(_stages(config, model), _moved(config, model, world_size), strict=True):
        weights = sum(_trained(config, stage)) * config.model.weight_bytes if config.lora.enabled else parts["weights"]
        reference = parts["reference"] / a.ref_model_sync_steps if a.sync_ref_model else 0.0
        copied.append(sum(parts.values()) + weights + parts["optimizer"] + reference)
    return copied


def _moved(config: RunConfig, model: HfConfig, world_size: int) -> list[dict[str, float]]:
    stages = stage_memory(config, model, max(1, world_size // config.parallel.model_parallel_size))
    return [{part: GIB * stage["train"].get(part, 0.0) for part in MOVED} for stage in stages]


def activation_bytes(config: RunConfig, model: HfConfig) -> list[float]:
    """Return, per stage, the peak bytes of one rank that `model.offload_activations` keeps on the host."""
    tokens = config.train.max_tokens_per_micro_batch / config.parallel.cp
    _, stored, _ = activation_elements(config, model, gpu=True)
    layers = [len(stage.layers) * in_flight(config, stage.index) for stage in _stages(config, model)]
    share = config.model.offload_activations
    return [max(0.0, count - NOT_OFFLOADED) * share * stored * tokens * config.model.weight_bytes for count in layers]


def _trained(config: RunConfig, stage: Stage) -> tuple[int, int]:
    """Return the trained parameters of one rank of a stage: (outside of experts, of experts)."""
    if config.lora.enabled:
        return stage.adapters, stage.expert_adapters
    return stage.outside - (stage.routers if config.train.freeze_moe_router else 0), stage.experts


def _rank(config: RunConfig, shards: Sequence[tuple[int, int, int]], chunk: int) -> dict[str, float]:
    """Return the bytes of one rank by purpose. Its shards are (trained parameters, number of this copy, copies); its
    largest buffer has `chunk` parameters."""
    train, element = config.train, config.model.weight_bytes
    weights = element * (2 if config.algorithm.sync_ref_model else 1)
    state = (4 if train.optimizer == "muon" else 8) + (4 if train.distributed_optimizer or element < 4 else 0)
    first = sum(size for size, copy, _ in shards if copy == 0)
    copied = first * (weights + state)
    moments = sum(size / (copies if train.distributed_optimizer else 1) for size, _, copies in shards)
    moments *= MOMENT_BYTES[train.optimizer_state_dtype] if train.optimizer_offload else 0
    writing, saving = copied if config.run.async_save else 0, float(copied)
    if train.distributed_optimizer:
        gathering = max(12 * min(size, chunk) * ((copy == 0) + 1 / copies) for size, copy, copies in shards)
        saving = 12 * first + max(gathering, writing, first * weights)
    return {"saving": saving, "writing": writing, "moments": moments}


def on_shared_gpu(
    config: RunConfig, memory: dict[str, dict[str, float]], engine: dict[str, float], reload: float
) -> dict[str, dict[str, float]]:
    """Return the phases of a GPU that a trainer rank shares with a server, which holds `engine` while it generates.

    If they take turns, the trainer is offloaded by then. While vLLM loads weights, only the trainer's weights are on
    the GPU. The staging of a weight sync includes the module that vLLM reloads, `reload` GiB.
    """
    staging = {"staging": memory["sync"]["staging"] + reload}
    if not config.takes_turns:
        return memory | {"generate": memory["generate"] | engine, "sync": memory["sync"] | staging}
    tower = {part: memory["sync"][part] for part in ("tower",) if part in memory["sync"]}  # it is not offloaded
    trainer = {"weights": memory["sync"]["weights"]} | tower | staging
    return memory | {"generate": engine | tower, "sync": trainer | {"vllm_weights": engine["vllm_weights"]}}


def smallest_gpu(
    config: RunConfig, memory: dict[str, dict[str, float]], engine: dict[str, float], reload: float
) -> float:
    """Return the GiB that a GPU needs for the trainer and vLLM. `engine` holds one sequence.

    A shared GPU without turns holds both at once. A started server's share must hold vLLM's weights and one sequence.
    The rest of the GPU must hold a module that vLLM reloads, if weights arrive while the server has its cache.
    """
    rollout, turns = config.rollout, config.takes_turns
    share = rollout.gpu_memory_utilization
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


@dataclass(frozen=True)
class Memory:
    """The GiB that a run needs. `phases` is phase -> part -> GiB on the fullest rank, with the server on its GPU, if
    any; `trainer` is the fullest phase without it. `host` is purpose -> GiB of RAM on the fullest node; empty when the
    ranks do not divide. `smallest_gpu` is what a GPU needs for its trainer rank, its vLLM server or both. `reload` is
    the module that a weight sync reloads in vLLM."""

    phases: dict[str, dict[str, float]]
    trainer: float
    host: dict[str, float]
    smallest_gpu: float
    reload: float


def run_memory(config: RunConfig, model: HfConfig, world_size: int, gpu_memory_gb: float | None) -> Memory:
    """Return the memory of a run on `world_size` ranks, on GPUs of `gpu_memory_gb` GiB or, with None, on CPUs."""
    p, has_gpu, colocated = config.parallel, gpu_memory_gb is not None, config.rollout.placed == "colocated"
    server = ServerMemory.of(config, model)
    reload, engine = server.reload_bytes() / GIB, server.parts(gpu_memory_gb)
    phases = trainer_memory(config, model, max(1, world_size // p.model_parallel_size), gpu=has_gpu)
    trainer = max(sum(parts.values()) for parts in phases.values())
    smallest = smallest_gpu(config, phases, engine | {"kv_cache": server.sequence()}, reload)
    divides = world_size % p.model_parallel_size == world_size % p.expert_parallel_size == 0
    host = host_memory(config, model, world_size, has_gpu, engine["vllm_weights"]) if divides else {}
    if colocated and not has_gpu:  # on CPUs vLLM does not sleep, and offloading frees no RAM
        phases["generate"] = phases["generate"] | engine
    elif colocated:
        phases = on_shared_gpu(config, phases, engine, reload)
    for parts in phases.values():
        parts["total"] = sum(parts.values())
    return Memory(phases, trainer, host, smallest, reload)
