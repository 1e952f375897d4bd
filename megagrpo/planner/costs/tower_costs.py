"""Predicts the memory and the seconds of the vision tower of a run with images (`data.images`)."""

from __future__ import annotations

from math import ceil

from megagrpo.config import RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.families.shared.tower_shape import TowerShape
from megagrpo.planner.costs.gpu_specs import Gpu
from megagrpo.planner.costs.shapes import Stage
from megagrpo.planner.costs.workload import Lengths, responses_together

EFFICIENCY = 0.5  # share of the peak that a tower's products and attention reach


def tower_shape(config: RunConfig, model: HfConfig) -> TowerShape | None:
    """Return the shape of the tower that a run computes, if any."""
    return model.vision.shape if config.data.images and model.vision else None


def tower_bytes(config: RunConfig, model: HfConfig, stage: Stage) -> float:
    """Return the bytes of a frozen tower on a rank of a stage: the whole tower on each rank that embeds tokens or has a
    decoder block that adds features of the tower. A trained one counts as parameters of the first stage."""
    shape = tower_shape(config, model)
    if shape is None or model.vision is None or config.towers == "trained":
        return 0.0
    has_tower = stage.index == 0 or any(layer < model.vision.levels for layer in stage.layers)
    return shape.parameters * config.model.weight_bytes * has_tower


def tower_activations(config: RunConfig, model: HfConfig) -> float:
    """Return the bytes that a trained tower keeps on a rank of the first stage until the backward passes of its
    micro-batches, if every prompt is one image; 0 for a frozen one. Every rank computes whole images."""
    shape, parallel = tower_shape(config, model), config.parallel
    if shape is None or model.vision is None or config.towers != "trained":
        return 0.0
    prompt, response = config.rollout.max_prompt_length, config.max_response_length
    bundle = prompt + responses_together(config, prompt, response) * response
    patches = model.vision.merge**2 * config.train.max_tokens_per_micro_batch * prompt / bundle
    in_flight = parallel.pp if parallel.vpp == 1 else 2 * parallel.pp  # micro-batches in the stage's first chunk
    kept = in_flight * shape.blocks * (shape.width if config.model.recompute == "full" else shape.kept)
    again = shape.kept if config.model.recompute == "full" else 0  # of the block that is recomputed
    return patches * (kept + again) * config.model.weight_bytes


def tower_seconds(config: RunConfig, model: HfConfig, gpu: Gpu, lengths: Lengths, replicas: int) -> float:
    """Return the seconds of one forward pass of the tower for a step's prompts on each of so many `replicas`, as if
    each prompt were one image. With tensor parallelism every rank computes it whole."""
    shape = tower_shape(config, model)
    if shape is None or model.vision is None:
        return 0.0
    prompts = ceil(config.rollout.prompts_per_step / replicas)
    flops = shape.flops(model.vision.merge**2 * lengths.prompt, lengths.prompt)
    return prompts * flops / (gpu.bf16_tflops * 1e12 * EFFICIENCY)
