"""Seconds of a forward and a backward pass of the trainer: for each layer and micro-batch the products, the memory that everything between
them reads and writes, the host that starts the kernels, and the messages. The formulas are in docs/plan.md."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megagrpo.config import RunConfig
from megagrpo.families.config import HfConfig
from megagrpo.plan.flops import attention_flops, token_flops
from megagrpo.plan.gpus import Gpu
from megagrpo.plan.links import HOST_GB_PER_S, Links, layer_seconds
from megagrpo.plan.memory import activation_elements, weight_bytes
from megagrpo.plan.workload import Lengths

DENSE_EFFICIENCY = 0.6  # share of the peak that products of large matrices get
ATTENTION_EFFICIENCY = 0.5
EXPERT_EFFICIENCY = 0.45  # of many narrow matrices, one for each expert
FP8_GAIN = 0.5  # of what the peak in FP8 has above that in bf16, the share that products get: operands are rounded first
IMBALANCE = 1.5  # tokens of the fullest rank's experts over those of the average, where ranks share experts out
BANDWIDTH = 0.8  # share of the memory's peak
TOUCHES = 4  # times that a tensor which a layer keeps is read or written in a forward pass
LAYER_STARTS = 0.3e-3  # seconds in which the host starts one layer's kernels, in one direction
EXPERT_LAYER_STARTS = 1.5e-3  # of a layer with experts, where it also waits to learn how many tokens each one gets


@dataclass(frozen=True)
class PassSeconds:
    """Of all samples of a step: a forward pass, a backward pass with what it recomputes and what both wait for activations on their way to
    the host and back, and the share of both that stages of the pipeline stand still."""

    forward: float
    backward: float
    bubble: float


def fill(config: RunConfig, lengths: Lengths) -> float:
    """Share of a micro-batch's budget that whole samples fill: half of one is left over on average, or all but one."""
    share = min(1.0, lengths.sample / config.train.max_tokens_per_micro_batch)
    return max(share, 1 - share / 2)


def pass_seconds(config: RunConfig, model: HfConfig, world_size: int, gpu: Gpu, lengths: Lengths) -> PassSeconds:
    """For a layout that fits the model and the ranks. Of one optimizer step's micro-batches, all data-parallel replicas have as many."""
    p, recompute = config.parallel, config.model.recompute
    samples = config.rollout.prompts_per_step * config.rollout.num_generations
    dp = world_size // p.model_parallel_size
    slices = config.algorithm.steps_per_generation
    budget = config.train.max_tokens_per_micro_batch
    per_update = samples * lengths.sample / dp / slices
    count = max(p.pp, ceil(per_update / (budget * fill(config, lengths))))  # micro-batches of one pass of one replica
    # Ranks that share out experts wait for each other in every layer, so for the fullest of their micro-batches.
    waits = model.experts is not None and p.ep * p.expert_tp > p.tp * p.cp
    tokens = min(budget, per_update) if waits else per_update / count
    cost = _Layers(config, model, gpu, tokens / p.cp, lengths)
    forward, talk = cost.forward, cost.messages
    kept = {"none": 0.0, "selective": cost.attention, "full": max(forward, cost.starts) + talk}[recompute]
    trained = 1 if config.lora.enabled else 2  # products of the backward pass: with adapters weights have no gradients
    backward = max(trained * cost.products + 2 * (cost.attention + cost.traffic), cost.starts) + talk + kept
    backward += sum(max(0.0, cost.copies - seconds) for seconds in (max(forward, cost.starts), backward))
    handed = (p.pp > 1) * p.vpp * Links(gpu).seconds(tokens / p.cp * cost.token_bytes / p.tp, p.tp * p.cp * dp + 1)
    head = lengths.response / lengths.sample * tokens / p.cp * token_flops(model).head / (cost.peak * DENSE_EFFICIENCY * p.tp)
    passes = slices * count
    bubble = (p.pp - 1) / (p.vpp * count)
    ahead = passes * ((max(forward, cost.starts) + talk) / p.pp + head + handed) * (1 + bubble)
    back = passes * (backward / p.pp + trained * head + handed) * (1 + bubble)
    return PassSeconds(ahead, back, bubble / (1 + bubble))


class _Layers:
    """All layers' forward pass of one micro-batch, of which a context-parallel rank has `tokens`: seconds of its parts on one rank, as if
    the rank had all stages."""

    def __init__(self, config: RunConfig, model: HfConfig, gpu: Gpu, tokens: float, lengths: Lengths):
        p, flops, element = config.parallel, token_flops(model), weight_bytes(config)
        mixed = len(model.experts.blocks) if model.experts else 0
        self.peak = gpu.bf16_tflops * 1e12 / (2 if element == 4 else 1)
        self.token_bytes = model.hidden_size * element
        uneven = IMBALANCE if p.ep > 1 else 1.0
        scores = attention_flops(model, lengths.sample) / lengths.sample
        self.products = tokens / p.tp / self.peak * (flops.dense / DENSE_EFFICIENCY + uneven * flops.experts / EXPERT_EFFICIENCY)
        self.products *= fp8_time(config, model, gpu)
        self.attention = tokens / p.tp / self.peak * scores / ATTENTION_EFFICIENCY
        touched = TOUCHES * activation_elements(config, model, gpu=True)[0] * element * model.num_layers
        self.traffic = tokens * touched / (gpu.memory_gb_per_s * 1e9 * BANDWIDTH)
        kept = activation_elements(config, model, gpu=True)[1] * config.model.offload_activations
        self.copies = tokens * kept * element * model.num_layers / (HOST_GB_PER_S * 1e9)
        self.starts = (model.num_layers - mixed) * LAYER_STARTS + mixed * EXPERT_LAYER_STARTS
        kv = 2 * (model.num_kv_heads / p.tp) * (model.head_dim + model.value_dim) / 2 * element
        links = Links(gpu)
        self.messages = (model.num_layers - mixed) * layer_seconds(links, p, self.token_bytes, tokens, kv, 0)
        if mixed:
            self.messages += mixed * layer_seconds(links, p, self.token_bytes, tokens, kv, uneven * model.experts.per_token)

    @property
    def forward(self) -> float:
        return self.products + self.attention + self.traffic


def fp8_time(config: RunConfig, model: HfConfig, gpu: Gpu) -> float:
    """What becomes of a second of products: 1 without FP8, less with it where layers use it."""
    if config.model.fp8_recipe == "none":
        return 1.0
    share = 1 - len({layer % model.num_layers for layer in config.model.bf16_layers}) / model.num_layers
    return 1 - share + share / (1 + FP8_GAIN * (gpu.fp8_tflops / gpu.bf16_tflops - 1))
