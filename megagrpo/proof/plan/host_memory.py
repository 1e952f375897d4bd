"""Predicts the host memory of trainer ranks: checkpoints, offloaded moments, and state and activations off the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.config import RunConfig
from megagrpo.models.families.hf_config import HfConfig
from megagrpo.proof.plan.gpu_specs import GPUS_PER_NODE
from megagrpo.proof.plan.planned_memory import (
    GIB,
    MOMENT_BYTES,
    NOT_OFFLOADED,
    activation_elements,
    engine_memory,
    in_flight,
    stage_memory,
    takes_turns,
    weight_bytes,
)
from megagrpo.proof.plan.shapes import largest_chunks, layers_of_ranks, stage_adapters, stage_experts, stage_parameters

MOVED = ("weights", "optimizer", "reference")  # to the host while vLLM generates


def host_memory(
    config: RunConfig, model: HfConfig, world_size: int, per_node: int = GPUS_PER_NODE, gpu: bool = False
) -> dict[str, float]:
    """Return GiB of RAM on the fullest node, by purpose. Python and libraries are not counted.

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
    p = config.parallel
    if config.lora.enabled:
        trained, experts = stage_adapters(model, p, config.lora), [0] * p.pp
    else:
        trained, experts = stage_parameters(model, p), stage_experts(model, p)
    chunks, ranks = largest_chunks(model, p), []
    turns = gpu and takes_turns(config)
    moved = moved_bytes(config, model, world_size) if turns else [0.0] * p.pp
    activations = activation_bytes(config, model) if gpu else [0.0] * p.pp
    # weights of the sleeping server on the same GPU
    beside = GIB * engine_memory(config, model)["vllm_weights"] if turns else 0.0
    # ranks go tp fastest, then cp, dp, pp; a stage's expert ranks go etp fastest, then ep
    for rank in range(world_size):
        stage, index = divmod(rank, world_size // p.pp)
        outside = _Shard(trained[stage], index // p.tp, world_size // (p.pp * p.tp))
        inside = _Shard(experts[stage], index // (p.expert_tp * p.ep), world_size // p.expert_parallel_size)
        purposes = _rank(config, [outside, inside], chunks[stage])
        purposes |= {"saving": purposes["saving"] + beside}
        ranks.append(purposes | {"offload": moved[stage], "activations": activations[stage]})
    nodes = [ranks[first : first + per_node] for first in range(0, world_size, per_node)]
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
    adapters = stage_adapters(model, config.parallel, config.lora) if config.lora.enabled else None
    for stage, parts in enumerate(_moved(config, model, world_size)):
        weights = parts["weights"] if adapters is None else adapters[stage] * weight_bytes(config)
        reference = parts["reference"] / a.ref_model_sync_steps if a.sync_ref_model else 0.0
        copied.append(sum(parts.values()) + weights + parts["optimizer"] + reference)
    return copied


def _moved(config: RunConfig, model: HfConfig, world_size: int) -> list[dict[str, float]]:
    stages = stage_memory(config, model, max(1, world_size // config.parallel.model_parallel_size))
    return [{part: GIB * stage["train"][part] for part in MOVED} for stage in stages]


def activation_bytes(config: RunConfig, model: HfConfig) -> list[float]:
    """Return, per stage, the peak bytes of one rank that `model.offload_activations` keeps on the host."""
    tokens = config.train.max_tokens_per_micro_batch / config.parallel.cp
    _, stored, _ = activation_elements(config, model, gpu=True)
    layers = [len(own) * in_flight(config, stage) for stage, own in enumerate(layers_of_ranks(model, config.parallel))]
    share = config.model.offload_activations
    return [max(0.0, count - NOT_OFFLOADED) * share * stored * tokens * weight_bytes(config) for count in layers]


@dataclass(frozen=True)
class _Shard:
    """Trained parameters that a rank holds, and the number of this copy among `copies`."""

    size: int
    copy: int
    copies: int


def _rank(config: RunConfig, shards: list[_Shard], chunk: int) -> dict[str, float]:
    """Return the bytes of one rank by purpose. Its largest buffer has `chunk` parameters."""
    train, element = config.train, weight_bytes(config)
    weights = element * (2 if config.algorithm.sync_ref_model else 1)
    state = (4 if train.optimizer == "muon" else 8) + (4 if train.distributed_optimizer or element < 4 else 0)
    first = sum(shard.size for shard in shards if shard.copy == 0)
    copied = first * (weights + state)
    moments = sum(shard.size / (shard.copies if train.distributed_optimizer else 1) for shard in shards)
    moments *= MOMENT_BYTES[train.optimizer_state_dtype] if train.optimizer_offload else 0
    if not train.distributed_optimizer:
        return {"saving": copied, "writing": copied if config.run.async_save else 0, "moments": moments}
    gathered = sum(12 * shard.size for shard in shards if shard.copy == 0)
    gathering = max(12 * min(shard.size, chunk) * ((shard.copy == 0) + 1 / shard.copies) for shard in shards)
    writing = copied if config.run.async_save else 0
    return {"saving": gathered + max(gathering, writing, first * weights), "writing": writing, "moments": moments}
