"""Predicts the seconds of the trainer's forward and backward pass. It counts, per layer and micro-batch, matrix
products, memory traffic between them, kernel launches by the host, and messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from megagrpo.config import RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.flops import sample_attention, token_flops
from megagrpo.planner.costs.gpu_specs import HOST_GB_PER_S, Gpu, Links, Messages, layer_messages
from megagrpo.planner.costs.hidden_messages import Direction, Overlap, sent_rows
from megagrpo.planner.costs.planned_memory import activation_elements, expert_output_elements
from megagrpo.planner.costs.workload import Bundle, Lengths, average_bundle, step_samples

DENSE_EFFICIENCY = 0.6  # share of the peak that products of large matrices reach
ATTENTION_EFFICIENCY = 0.5
EXPERT_EFFICIENCY = 0.15  # the same share for many narrow matrices, one for each expert
FP8_GAIN = 0.5  # share of FP8's advantage in peak over bf16 that products reach; rounding operands takes the rest
IMBALANCE = 1.5  # tokens on the fullest rank's experts / average tokens, with expert parallelism
BANDWIDTH = 0.8  # share of the peak memory bandwidth that kernels reach
TOUCHES = 4  # reads and writes per kept tensor of a layer in a forward pass
LAYER_STARTS = 0.3e-3  # seconds that the host takes to launch one layer's kernels, in one direction
EXPERT_LAYER_STARTS = 3e-3  # the same for a layer with experts, where the host also waits for the token counts


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a step's passes: `forward`, and `backward` with recompute and the wait for offloaded activations.

    `bubble` is the share of both in which pipeline stages are idle. `gains` are the seconds of `Overlap.gains`, and
    `first` those of one micro-batch's forward pass.
    """

    forward: float
    backward: float
    bubble: float
    gains: Mapping[str, float]
    first: float


def fill(config: RunConfig, lengths: Lengths) -> float:
    """Return the share of a micro-batch's budget that whole bundles fill. On average half a bundle's room, or all but
    one bundle's, is left over."""
    share = min(1.0, average_bundle(config, lengths).tokens / config.train.max_tokens_per_micro_batch)
    return max(share, 1 - share / 2)


def pass_seconds(config: RunConfig, model: HfConfig, world_size: int, gpu: Gpu, lengths: Lengths) -> PassSeconds:
    """Return the seconds of a layout that fits the model and the ranks. Every data-parallel replica has equally many
    micro-batches per step."""
    p, recompute = config.parallel, config.model.recompute
    samples = step_samples(config)
    dp = world_size // p.model_parallel_size
    slices = config.algorithm.steps_per_generation
    budget = config.train.max_tokens_per_micro_batch
    bundle = average_bundle(config, lengths)
    per_update = samples * bundle.tokens_per_response / dp / slices
    count = max(p.pp, ceil(per_update / (budget * fill(config, lengths))))  # micro-batches of one pass of one replica
    # Expert-parallel ranks wait for each other in every layer, so the fullest of their micro-batches sets the time.
    # With `tp` in `train.overlap` all micro-batches are padded to the budget.
    waits = (model.experts is not None and p.ep * p.expert_tp > p.tp * p.cp) or "tp" in config.train.overlap
    tokens = min(budget, per_update) if waits else per_update / count
    cost = _Layers(config, model, gpu, tokens / p.cp, bundle)
    forward, talk = cost.forward, sum(cost.messages)
    recomputed = {"none": 0.0, "selective": cost.attention, "full": max(forward, cost.starts) + talk}[recompute]
    # backward products per forward one: with adapters weights have no gradients
    trained = 1 if config.lora.enabled else 2
    backward = max(trained * cost.products + 2 * (cost.attention + cost.traffic), cost.starts) + talk + recomputed
    overlap = _overlap(config, model, cost, trained, slices * count)
    hidden_ahead, hidden_back = overlap.hidden_by(config.train.overlap)
    backward += sum(max(0.0, cost.copies - seconds) for seconds in (max(forward, cost.starts), backward))
    handed = (p.pp > 1) * p.vpp * Links(gpu).seconds(tokens / p.cp * cost.token_bytes / p.tp, p.tp * p.cp * dp + 1)
    responses = bundle.response / bundle.tokens_per_response * tokens / p.cp
    head = responses * token_flops(model).head / (cost.peak * DENSE_EFFICIENCY * p.tp)
    passes = slices * count
    bubble = (p.pp - 1) / (p.vpp * count)
    ahead = passes * ((max(forward, cost.starts) + talk - hidden_ahead) / p.pp + head + handed) * (1 + bubble)
    back = passes * ((backward - hidden_back) / p.pp + trained * head + handed) * (1 + bubble)
    gains = {name: passes * gain / p.pp * (1 + bubble) for name, gain in overlap.gains().items()}
    return PassSeconds(ahead, back, bubble / (1 + bubble), gains, ahead / passes)


def _overlap(config: RunConfig, model: HfConfig, cost: _Layers, trained: int, micro_batches: int) -> Overlap:
    """Return what can overlap in the passes of one micro-batch, as if the rank had all stages."""
    again = config.model.recompute == "full"
    sent, tp, linears = cost.messages.experts, cost.messages.tp, cost.products - cost.experts
    ahead = Direction(linears, cost.experts, cost.forward, tp, sent)
    computed = (trained + again) * cost.products + (2 + again) * (cost.attention + cost.traffic)
    products = (trained + again) * linears, (trained + again) * cost.experts
    back = Direction(*products, computed, (1 + again) * tp, (1 + again) * sent)
    return Overlap(config, model, ahead, back, micro_batches)


class _Layers:
    """Seconds of all layers' forward pass of one micro-batch, by part, on one rank, as if the rank had all stages.

    `tokens` is the number of tokens of a context-parallel rank.
    """

    def __init__(self, config: RunConfig, model: HfConfig, gpu: Gpu, tokens: float, bundle: Bundle):
        p, flops, element = config.parallel, token_flops(model), config.model.weight_bytes
        mixed = len(model.experts.blocks) if model.experts else 0
        self.peak = gpu.bf16_tflops * 1e12 / (2 if element == 4 else 1)
        self.token_bytes = model.hidden_size * element
        uneven = IMBALANCE if p.ep > 1 else 1.0
        attention = sample_attention(model, bundle.prompt, bundle.response, bundle.responses)
        each = tokens / p.tp / self.peak * fp8_time(config, model, gpu)
        self.experts = each * uneven * flops.experts / EXPERT_EFFICIENCY
        self.products = each * flops.dense / DENSE_EFFICIENCY + self.experts
        scores = attention / bundle.tokens_per_response
        self.attention = tokens / p.tp / self.peak * scores / ATTENTION_EFFICIENCY
        everything, stored, _ = activation_elements(config, model, gpu=True)
        touched = (everything + expert_output_elements(model, p.tp)) * TOUCHES * element * model.num_layers
        self.traffic = tokens * touched / (gpu.memory_gb_per_s * 1e9 * BANDWIDTH)
        self.copies = (
            tokens * stored * config.model.offload_activations * element * model.num_layers / (HOST_GB_PER_S * 1e9)
        )
        self.starts = (model.num_layers - mixed) * LAYER_STARTS + mixed * EXPERT_LAYER_STARTS
        kv = 2 * model.kv_heads_of_rank(p.tp) * (model.head_dim + model.value_dim) / 2 * element
        links = Links(gpu)
        sizes = links, p, self.token_bytes, tokens, kv
        plain, sent = layer_messages(*sizes, 0), uneven * sent_rows(p, model) if mixed else 0
        with_experts = layer_messages(*sizes, sent)
        sums = [
            (model.num_layers - mixed) * one + mixed * other for one, other in zip(plain, with_experts, strict=True)
        ]
        if p.tp > model.num_kv_heads:  # Megatron gathers q, k and v
            gathered = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * element
            sums[0] += model.num_layers * links.reduce_scatter(tokens * gathered, p.tp)
        self.messages = Messages(*sums)

    @property
    def forward(self) -> float:
        return self.products + self.attention + self.traffic


def fp8_time(config: RunConfig, model: HfConfig, gpu: Gpu) -> float:
    """Return the factor on the seconds of products: 1 without FP8, less with FP8 in proportion to its layers."""
    if config.model.fp8_recipe == "none":
        return 1.0
    share = 1 - len({layer % model.num_layers for layer in config.model.bf16_layers}) / model.num_layers
    return 1 - share + share / (1 + FP8_GAIN * (gpu.fp8_tflops / gpu.bf16_tflops - 1))
