"""Traces a training step of one rank: the real policy, loss and optimizer, on tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

import torch

from benchmarks.tracing.fused_kernels import fused_kernels, take_activations_of_a_gpu
from benchmarks.tracing.offloaded_moments import offloaded_moments
from benchmarks.tracing.one_rank import one_rank
from benchmarks.tracing.roofline import Costs, Trace, trace_rows
from benchmarks.tracing.without_floats import StepCounter, WithoutFloats
from megagrpo.algorithms.losses import make_loss
from megagrpo.config import ConfigError, RunConfig
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.gpu_specs import Gpu
from megagrpo.planner.costs.planned_memory import stage_memory
from megagrpo.planner.costs.workload import Lengths
from megagrpo.platform import device
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.train_types import Metric, TrainBatch, TrainSample


def trace_step(
    config: RunConfig, model: HfConfig, world_size: int, rank: int, prompt: int, response: int, extra: int = 1
) -> Trace:
    """Trace train steps of `rank`, with samples of `prompt` + `response` tokens.

    The first step creates the optimizer's moments. The second has the schedule's fewest micro-batches. The third has 1
    + `extra` times as many, at least pp, to reach the memory peak. The difference of the last two gives a micro-batch's
    costs. Raises ConfigError on a machine with a GPU: the model would be built for its kernels.
    """
    if device.has_gpu():
        raise ConfigError(
            "the trace counts operations without a GPU, but this machine has one; set CUDA_VISIBLE_DEVICES= to hide it"
        )
    config = config.without_overlap  # `roofline` subtracts what overlaps
    config = config.model_copy(update={"train": config.train.model_copy(update={"overlap_grad_reduce": False})})
    p, counter = config.parallel, StepCounter()
    few = p.pp if p.vpp > 1 else 1  # the interleaved schedule takes multiples of pp
    many = max((1 + extra) * few, p.pp)
    shape = _message_shape(config, model, prompt, response)
    with (
        one_rank(config.parallel, world_size, rank, counter) as layout,
        fused_kernels(config, model, counter),
        offloaded_moments(counter),
        WithoutFloats(counter, shape),
    ):
        policy = MegatronPolicy(config, layout, model)
        take_activations_of_a_gpu(policy.chunks, model, config.model.fusions)
        _mark(policy, counter)
        loss = make_loss(config.algorithm)

        def step(micro_batches: int) -> Costs:
            batch = batch_of(config, model, policy.shares_prompts, prompt, response, micro_batches)
            counter.begin()
            policy.train_step(batch, loss, 1)
            return counter.costs

        step(few)
        small, large = step(few), step(many)
        peak = dict(counter.peak)
    each = Costs().plus(large, 1 / (many - few)).plus(small, -1 / (many - few))
    per = _samples_per_micro_batch(config, prompt + response)
    return Trace(small.plus(each, -few), each, peak, per * (prompt + response), per * response)


def rows_of(
    config: RunConfig, model: HfConfig, world_size: int, gpu: Gpu | None, lengths: Lengths
) -> list[tuple[str, str]]:
    """Trace the fullest stage's first rank for average-length samples; return the rows of `trace_rows`."""
    stages = stage_memory(config, model, max(1, world_size // config.parallel.model_parallel_size))
    stage = max(range(len(stages)), key=lambda stage: sum(stages[stage]["train"].values()))
    prompt, response = max(1, round(lengths.prompt)), max(1, round(lengths.response))
    trace = trace_step(config, model, world_size, stage * (world_size // config.parallel.pp), prompt, response)
    return trace_rows(config, model, trace, world_size, stage, gpu, lengths)


def _samples_per_micro_batch(config: RunConfig, length: int) -> int:
    return max(1, config.train.max_tokens_per_micro_batch // length)


def _message_shape(config: RunConfig, model: HfConfig, prompt: int, response: int) -> tuple[int, int, int]:
    """Return the shape of hidden states passed between stages, [T / cp / tp with sequence parallelism, 1, H]."""
    p, align = config.parallel, config.micro_batch_align
    tokens = ceil(_samples_per_micro_batch(config, prompt + response) * (prompt + response) / align) * align // p.cp
    return tokens // (p.tp if p.sequence_parallel else 1), 1, model.hidden_size


def batch_of(
    config: RunConfig, model: HfConfig, shares: bool, prompt: int, response: int, micro_batches: int
) -> TrainBatch:
    """Return a batch with this many micro-batches of equal samples. No two samples share a prompt.

    Packing needs samples for a micro-batch or more per pipeline stage. Micro-batches above `micro_batches` are dropped.
    """
    samples, length = [], prompt + response
    for index in range(max(micro_batches, config.parallel.pp) * _samples_per_micro_batch(config, length)):
        ids, mask = torch.randint(0, model.vocab_size, (length,)), torch.arange(length) >= prompt
        ids[0] = index
        advantage = 1.0 - 2.0 * (index % 2)
        samples.append(TrainSample(ids, mask, torch.where(mask, -12.0, 0.0), advantage, index=index))
    batch = pack(samples, packing_rules(config, shares))
    return replace(batch, micro_batches=batch.micro_batches[:micro_batches])


def _mark(policy: Any, counter: StepCounter) -> None:
    """Set the counter's phase when the policy enters its parts."""

    def wrapped(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            before, counter.phase = counter.phase, phase
            try:
                return function(*args, **kwargs)
            finally:
                counter.phase = before

        return marked

    reduce_metrics = policy._reduce_metrics

    def reduced(per_micro_batch: list[Any]) -> Any:
        """Return the metrics, no bad tensor, and False for wrong early gradients, because that flag has no data.

        The transfer to the host counts as one wait, although the trace reads the numbers one by one. A stage without
        the LM head gets a loss of 0; in a real run it gets the loss of the last stage.
        """
        waits = counter.costs.waits.copy()
        metrics, _, _ = reduce_metrics(per_micro_batch)
        counter.costs.waits = waits
        counter.wait()
        return {"loss": Metric(0.0)} | metrics, None, False

    policy._reduce_metrics = reduced
    policy._loss_inputs = wrapped(policy._loss_inputs, "head")
    policy.backward = wrapped(policy.backward, "forward")
    policy.update = wrapped(policy.update, "optimizer")
    finalize = wrapped(policy._finalize_gradients, "reduce")
    for chunk in policy.chunks:
        chunk.config.finalize_model_grads_func = finalize
