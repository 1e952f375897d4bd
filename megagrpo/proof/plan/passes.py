"""Predicts the seconds of the trainer's forward and backward pass. It counts, per layer and micro-batch, matrix
products, memory traffic between them, kernel launches by the host, and messages. The formulas are in docs/plan.md."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megagrpo.config import RunConfig
from megagrpo.models.families.hf_config import HfConfig
from megagrpo.proof.plan.flops import attention_flops, token_flops
from megagrpo.proof.plan.gpu_specs import HOST_GB_PER_S, Gpu, Links, layer_seconds
from megagrpo.proof.plan.planned_memory import activation_elements, expert_output_elements
from megagrpo.proof.plan.workload import Lengths

DENSE_EFFICIENCY = 0.6  # share of the peak that products of large matrices reach
ATTENTION_EFFICIENCY = 0.5
EXPERT_EFFICIENCY = 0.45  # the same share for many narrow matrices, one for each expert
FP8_GAIN = 0.5  # share of FP8's advantage in peak over bf16 that products reach; rounding operands takes the rest
IMBALANCE = 1.5  # tokens on the fullest rank's experts / average tokens, with expert parallelism
BANDWIDTH = 0.8  # share of the peak memory bandwidth that kernels reach
TOUCHES = 4  # reads and writes per kept tensor of a layer in a forward pass
LAYER_STARTS = 0.3e-3  # seconds that the host takes to launch one layer's kernels, in one direction
EXPERT_LAYER_STARTS = 1.5e-3  # the same for a layer with experts, where the host also waits for the token counts


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a step's passes: `forward`, and `backward` with recompute and the wait for offloaded activations.

    `bubble` is the share of both in which pipeline stages are idle.
    """

    forward: float
    backward: float
    bubble: float


def fill(config: RunConfig, lengths: Lengths) -> float:
    """Return the share of a micro-batch's budget that whole samples fill. On average half a sample's room, or all but
    one sample's, is left over."""
    share = min(1.0, lengths.sample / config.train.max_tokens_per_micro_batch)
    return max(share, 1 - share / 2)


def pass_seconds(config: RunConfig, model: HfConfig, world_size: int, gpu: Gpu, lengths: Lengths) -> PassSeconds:
    """Return the seconds of a layout that fits the model and the ranks. Every data-parallel replica has equally many
    micro-batches per step."""
    p, recompute = config.parallel, config.model.recompute
    samples = config.rollout.prompts_per_step * config.rollout.num_generations
    dp = world_size // p.model_parallel_size
    slices = config.algorithm.steps_per_generation
    budget = config.train.max_tokens_per_micro_batch
    per_update = samples * lengths.sample / dp / slices
    count = max(p.pp, ceil(per_update / (budget * fill(config, lengths))))  # micro-batches of one pass of one replica
    # Expert-parallel ranks wait for each other in every layer, so the fullest of their micro-batches sets the time.
    waits = model.experts is not None and p.ep * p.expert_tp > p.tp * p.cp
    tokens = min(budget, per_update) if waits else per_update / count
    cost = _Layers(config, model, gpu, tokens / p.cp, lengths)
    forward, talk = cost.forward, cost.messages
    recomputed = {"none": 0.0, "selective": cost.attention, "full": max(forward, cost.starts) + talk}[recompute]
    # backward products per forward one: with adapters weights have no gradients
    trained = 1 if config.lora.enabled else 2
    backward = max(trained * cost.products + 2 * (cost.attention + cost.traffic), cost.starts) + talk + recomputed
    backward += sum(max(0.0, cost.copies - seconds) for seconds in (max(forward, cost.starts), backward))
    handed = (p.pp > 1) * p.vpp * Links(gpu).seconds(tokens / p.cp * cost.token_bytes / p.tp, p.tp * p.cp * dp + 1)
    responses = lengths.response / lengths.sample * tokens / p.cp
    head = responses * token_flops(model).head / (cost.peak * DENSE_EFFICIENCY * p.tp)
    passes = slices * count
    bubble = (p.pp - 1) / (p.vpp * count)
    ahead = passes * ((max(forward, cost.starts) + talk) / p.pp + head + handed) * (1 + bubble)
    back = passes * (backward / p.pp + trained * head + handed) * (1 + bubble)
    return PassSeconds(ahead, back, bubble / (1 + bubble))


class _Layers:
    """Seconds of all layers' forward pass of one micro-batch, by part, on one rank, as if the rank had all stages.

    `tokens` is the number of tokens of a context-parallel rank.
    """

    def __init__(self, config: RunConfig, model: HfConfig, gpu: Gpu, tokens: float, lengths: Lengths):
        p, flops, element = config.parallel, token_flops(model), config.model.weight_bytes
        mixed = len(model.experts.blocks) if model.experts else 0
        self.peak = gpu.bf16_tflops * 1e12 / (2 if element == 4 else 1)
        self.token_bytes = model.hidden_size * element
        uneven = IMBALANCE if p.ep > 1 else 1.0
        scores = attention_flops(model, lengths.sample) / lengths.sample
        self.products = (
            tokens / p.tp / self.peak * (flops.dense / DENSE_EFFICIENCY + uneven * flops.experts / EXPERT_EFFICIENCY)
        )
        self.products *= fp8_time(config, model, gpu)
        self.attention = tokens / p.tp / self.peak * scores / ATTENTION_EFFICIENCY
        touched = activation_elements(config, model, gpu=True)[0] + expert_output_elements(model, p.tp)
        touched *= TOUCHES * element * model.num_layers
        self.traffic = tokens * touched / (gpu.memory_gb_per_s * 1e9 * BANDWIDTH)
        recomputed = activation_elements(config, model, gpu=True)[1] * config.model.offload_activations
        self.copies = tokens * recomputed * element * model.num_layers / (HOST_GB_PER_S * 1e9)
        self.starts = (model.num_layers - mixed) * LAYER_STARTS + mixed * EXPERT_LAYER_STARTS
        kv = 2 * (model.num_kv_heads / p.tp) * (model.head_dim + model.value_dim) / 2 * element
        links = Links(gpu)
        self.messages = (model.num_layers - mixed) * layer_seconds(links, p, self.token_bytes, tokens, kv, 0)
        if mixed:
            sent = uneven * model.mixture.per_token
            self.messages += mixed * layer_seconds(links, p, self.token_bytes, tokens, kv, sent)

    @property
    def forward(self) -> float:
        return self.products + self.attention + self.traffic


def fp8_time(config: RunConfig, model: HfConfig, gpu: Gpu) -> float:
    """Return the factor on the seconds of products: 1 without FP8, less with FP8 in proportion to its layers."""
    if config.model.fp8_recipe == "none":
        return 1.0
    share = 1 - len({layer % model.num_layers for layer in config.model.bf16_layers}) / model.num_layers
    return 1 - share + share / (1 + FP8_GAIN * (gpu.fp8_tflops / gpu.bf16_tflops - 1))
