"""Runs one step of a policy in some layout, and collects all results as whole Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.config import RunConfig
from megagrpo.data.examples import Layout as RowLayout
from megagrpo.data.packing.readings import with_readings, with_teachers
from megagrpo.data.packing.sample_packing import SampleShapes, build_batch, packing_rules, plan_packing
from megagrpo.families.hf_config import HfConfig
from megagrpo.families.shared.boxes import Box
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.policy.critic import Critic, of_the_critic
from megagrpo.policy.fp8.dense_access import write_dense
from megagrpo.policy.fp8.masters import unrounded_values
from megagrpo.policy.fp8.tensor import dense
from megagrpo.policy.layers.scalar_head import SCORE
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.moe.rank_routed_experts import with_sample_routes
from megagrpo.policy.moe.routing_replay import route_shape
from megagrpo.policy.optimizer.policy_optimizer import gather_gradients
from megagrpo.policy.reference import Reference
from megagrpo.policy.scalar_model import ScalarModel
from megagrpo.policy.step_terms import add_step_terms
from megagrpo.policy.teacher import build_teachers
from megagrpo.proof.verify.shrink import random_routes, random_tensor
from megagrpo.records.rows.step_metrics import values_of
from megagrpo.train_types import LossInputs, LossOutput, MicroBatch, TrainBatch, TrainSample
from megagrpo.trainer.methods.method_table import ROW_METHODS
from megagrpo.trainer.methods.row_loop import with_step_values
from megagrpo.trainer.methods.row_wiring import Method
from megagrpo.weights.blocks.parameter_blocks import Parameter, adapter_blocks, blocks, fill, trained_blocks

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """The results of a step. Tensors are float64, on the CPU, whole, under their Hugging Face names."""

    metrics: dict[str, float]  # loss, gradient norm and the loss's metrics
    logprobs: Tensor  # [N] of every loss token before the step, in an order that is the same in every layout
    gradients: Tensors  # gradients of the loss over its denominator, before clipping
    weights: Tensors  # weights after the step
    # largest relative difference of a gradient or weight between two ranks that hold the same part of it
    disagreement: float
    padding: float  # largest gradient of the vocabulary's padding, which belongs to no token
    extremes: frozenset[str] = frozenset()  # metrics that are the largest or smallest of single tokens


def take_step(
    config: RunConfig,
    hf_config: HfConfig,
    samples: Sequence[TrainSample],
    weights: Callable[[str, tuple[int, ...]], Tensor] | None = None,
) -> Outcome | None:
    """Take one step of the config's method on `samples` in the layout of `config`. Return the outcome on rank 0, None
    elsewhere.

    `weights(name, shape)` returns the model's tensors by Hugging Face name; None: random tensors. The policy is moved
    away from them; the reference keeps them. Collective over the world, which stays open for another layout.
    """
    layout = init_layout(config.parallel, config.run.seed)
    try:
        policy, batch, logprobs = prepare(config, hf_config, layout, samples, weights)
        of_critic = Outcome({}, torch.zeros(0), {}, {}, 0.0, 0.0)
        if config.algorithm.has_critic:
            batch, of_critic = _critic_step(config, hf_config, layout, batch, weights)
        divisor = denominator(batch, config.algorithm.loss.average, config.rollout.max_completion_length)
        batch = add_step_terms(batch, policy, divisor, config.algorithm.entropy_coef)
        method = _row_method(config)
        loss_fn = (method.make_loss if method else make_loss)(config.algorithm)
        metrics = policy.backward(batch, loss_fn, divisor)
        gather_gradients(policy.model)
        gradients, apart, padding = whole_tensors(policy, hf_config, layout, attrgetter("main_grad"))
        metrics |= policy.update()
        moves_biases = config.algorithm.moe_router_bias_update_rate > 0
        stepped, also_apart, _ = whole_tensors(policy, hf_config, layout, attrgetter("data"), moves_biases)
        rows = _rows_of_tokens(batch, logprobs, layout)
    finally:
        layout.release()
    if rows is None:
        return None
    extremes = frozenset(name for name, metric in metrics.items() if metric.reduce in ("max", "min"))
    apart, padding = max(apart, also_apart, of_critic.disagreement), max(padding, of_critic.padding)
    gradients, stepped = gradients | of_critic.gradients, stepped | of_critic.weights
    return Outcome(values_of(metrics) | of_critic.metrics, rows, gradients, stepped, apart, padding, extremes)


def _critic_step(
    config: RunConfig,
    hf_config: HfConfig,
    layout: Layout,
    batch: TrainBatch,
    weights: Callable[[str, tuple[int, ...]], Tensor] | None,
) -> tuple[TrainBatch, Outcome]:
    """Return the batch with the advantages of a critic with random weights, and the outcome of its step, without rows;
    on ranks above 0 without tensors."""
    critic, random = Critic(config, layout, hf_config), weights or random_tensor
    fill_weights(critic, hf_config, layout, random)
    critic.fill_head(random(SCORE, (1, hf_config.hidden_size))[0])
    (batch,), judged = critic.judged([batch])
    metrics = critic.backward(batch, critic.loss_fn, batch.num_tokens)
    gather_gradients(critic.model)

    def tensors(part: Callable[[Any], Tensor]) -> tuple[Tensors, float, float]:
        whole, apart, padding = whole_tensors(critic, hf_config, layout, part)
        head = critic.head_weight(part).double()
        return {f"critic.{name}": tensor for name, tensor in (whole | {SCORE: head}).items()}, apart, padding

    gradients, apart, padding = tensors(attrgetter("main_grad"))
    metrics |= critic.update()
    stepped, also_apart, _ = tensors(attrgetter("data"))
    values = values_of(of_the_critic(metrics)) | judged
    return batch, Outcome(values, torch.zeros(0), gradients, stepped, max(apart, also_apart), padding)


def prepare(
    config: RunConfig,
    hf_config: HfConfig,
    layout: Layout,
    samples: Sequence[TrainSample],
    weights: Callable[[str, tuple[int, ...]], Tensor] | None = None,
) -> tuple[MegatronPolicy, TrainBatch, list[Tensor | None]]:
    """Return (policy, this rank's batch with all loss inputs, policy log-probs [T] per micro-batch) before a step."""
    method = _row_method(config)
    policy = (method.kind if method else MegatronPolicy)(config, layout, hf_config)
    random = partial(random_tensor, temperature=config.rollout.temperature, centred_norms=hf_config.centred_norms)
    fill_weights(policy, hf_config, layout, weights or random)
    if isinstance(policy, ScalarModel):
        policy.fill_head(random_tensor("score.weight", (hf_config.hidden_size,)))
    samples = samples if method is None else [_row_sample(sample, method.layout) for sample in samples]
    reference = Reference(policy) if config.algorithm.has_reference else None
    shapes = [None if teacher.is_own else hf_config for teacher in config.algorithm.teacher]
    teachers = [*build_teachers(config, policy, reference, shapes)]
    for teacher in teachers:
        if isinstance(teacher.model, MegatronPolicy) and teacher.model is not policy:
            fill_weights(teacher.model, hf_config, layout, weights or random)
    _move_away(policy)
    policy.weights_changed()
    rules, read = packing_rules(config, policy.shares_prompts), dict(enumerate(_read_by_teachers(samples, config)))
    plan = plan_packing(SampleShapes.of(samples, rules), rules, layout.dp_size)
    batch = build_batch(plan, layout.dp_rank, read, rules)
    batch = with_readings(batch, plan, layout.dp_rank, read, rules)
    if config.rollout.routing_replay == "engine":
        shape = route_shape(hf_config)
        batch = with_sample_routes(batch, random_routes(samples, shape), layout, shape)
    if config.rollout.routing_replay == "trainer":
        batch = policy.replay.recorded(batch, policy.logprobs)
    logprobs = policy.logprobs(batch)
    batch = batch.with_terms(old_logprobs=_old_logprobs(batch, logprobs))
    batch = reference.annotate(batch) if reference is not None and config.algorithm.beta else batch
    if config.algorithm.loss.whole_step:
        batch = with_step_values(batch, config.algorithm, layout, torch.tensor([one.advantage for one in samples]))
    for teacher in teachers:
        batch = teacher.annotate(batch, step=1)
    return policy, batch, logprobs


def _row_method(config: RunConfig) -> Method | None:
    of = ROW_METHODS.get(config.algorithm.loss.method)
    return None if of is None else of(config)


def _row_sample(sample: TrainSample, layout: RowLayout) -> TrainSample:
    """Return the sample as a method on rows has it: with a score at its last token, with a label, or the value 1 of a
    response."""
    mask, odd = sample.response_mask, sample.index % 2
    if layout.scores:
        mask = torch.arange(mask.numel()) == mask.numel() - 1
    value = 0.3 * (1 - odd) if layout.scores else (0.0 if odd else 1.0 - sample.index % 4) if layout.mismatched else 1.0
    return replace(sample, response_mask=mask, advantage=value, truncated=False)


def _read_by_teachers(samples: Sequence[TrainSample], config: RunConfig) -> Sequence[TrainSample]:
    """Return the samples as teachers read them: after their prompt in reverse and three tokens more where a teacher has
    a prompt, and without every third prompt where it has a choice of rows."""
    teachers = config.algorithm.teachers
    if not any(teacher.prompt or teacher.where for teacher in teachers.values()):
        return samples
    read = []
    for sample in samples:
        start = int(sample.response_mask.int().argmax())
        prompt = [*sample.token_ids[:start].flip(0).tolist(), 5, 6, 7]
        prompts = {
            name: None if teacher.where and sum(prompt) % 3 == 0 else prompt if teacher.prompt else []
            for name, teacher in teachers.items()
        }
        read.append(with_teachers(sample, prompts, sample.token_ids.numel() - start))
    return read


@torch.no_grad()
def fill_weights(
    policy: MegatronPolicy,
    hf_config: HfConfig,
    layout: Layout,
    weights: Callable[[str, tuple[int, ...]], Tensor] = random_tensor,
) -> None:
    """Fill this rank's parameters with the shards of `weights(name, shape)`; the vocabulary's padding is 0."""
    model = (policy.chunks, hf_config, layout)
    for _, parameter, of_parameter in (*blocks(*model), *adapter_blocks(*model)):
        fill(parameter, of_parameter, lambda b: weights(b.name, b.shape)[b.slices])


def policy_gradient(inputs: LossInputs) -> LossOutput:
    """A loss that needs no earlier computation: minus the sum of log-prob times advantage."""
    rows = inputs.micro_batch
    return LossOutput(-(inputs.policy_logprobs * rows.advantages * rows.loss_mask).sum(), {})


@torch.no_grad()
def _move_away(policy: MegatronPolicy) -> None:
    """Move the policy away from the reference by a function of each weight alone, the same in every layout."""
    for chunk in policy.chunks:
        for parameter in filter(lambda p: p.requires_grad, chunk.parameters()):
            master = unrounded_values(parameter)
            before = dense(parameter) if master is None else master
            write_dense(parameter, before + 0.02 * torch.sin(40 * before))


def _old_logprobs(batch: TrainBatch, logprobs: list[Tensor | None]) -> list[Tensor]:
    """Return old log-probs [T] per micro-batch, from the token alone, far enough from the policy's to clip some."""
    return [_shifted(m, rows) for m, rows in zip(batch.micro_batches, logprobs, strict=True)]


def _shifted(micro_batch: MicroBatch, logprobs: Tensor | None) -> Tensor:
    if logprobs is None:  # only the last stage computes losses
        return torch.zeros(micro_batch.num_tokens)
    noise = torch.sin(micro_batch.position_ids.float() + micro_batch.labels.float())
    return torch.where(micro_batch.loss_mask, logprobs.cpu() + 0.3 * noise, 0.0)


def _rows_of_tokens(batch: TrainBatch, logprobs: list[Tensor | None], layout: Layout) -> Tensor | None:
    """Return log-probs of all ranks' loss tokens, sorted by rollout log-prob, which is unique per token; on rank 0."""
    mine: dict[float, float] = {}
    if layout.is_last_stage and layout.tp_rank == 0:
        for micro_batch, rows in zip(batch.micro_batches, logprobs, strict=True):
            assert rows is not None, "the last stage computes log-probs"
            keys, values = micro_batch.rollout_logprobs[micro_batch.loss_mask], rows.cpu()[micro_batch.loss_mask]
            mine |= dict(zip(keys.tolist(), values.tolist(), strict=True))
    everyone = _gather(mine, layout)
    if everyone is None:
        return None
    merged = {key: value for part in everyone for key, value in part.items()}
    return torch.tensor([merged[key] for key in sorted(merged)], dtype=torch.float64)


@torch.no_grad()
def whole_tensors(
    policy: MegatronPolicy,
    hf_config: HfConfig,
    layout: Layout,
    part: Callable[[Parameter], Tensor],
    biases: bool = False,
) -> tuple[Tensors, float, float]:
    """Return `part(parameter)` of every trained parameter, and with `biases` of every expert bias, as whole tensors in
    Hugging Face shapes, merged from all ranks' blocks; on rank 0, empty elsewhere.

    The second result is the largest relative difference between ranks with the same block, the third the largest
    element outside all blocks.
    """
    mine, padding = [], 0.0
    for _, parameter, of_parameter in trained_blocks(policy.chunks, hf_config, layout, biases):
        tensor = part(parameter).detach().to("cpu", torch.float64, copy=True)
        for block in of_parameter:
            view = block.view(tensor)
            array = view.reshape(block.block_shape).clone().numpy()  # pickles faster than a tensor
            mine.append((block.name, block.shape, block.box, array))
            view.zero_()
        padding = max(padding, tensor.abs().max().item()) if tensor.numel() else padding
    everyone = _gather((mine, padding), layout)
    if everyone is None:
        return {}, 0.0, 0.0
    whole: Tensors = {}
    first_copies: dict[tuple[str, Box], Tensor] = {}
    apart = 0.0
    for name, shape, box, array in [piece for pieces, _ in everyone for piece in pieces]:
        value = torch.from_numpy(array)
        if (name, box) in first_copies:
            apart = max(apart, relative_error(value, first_copies[name, box]))
            continue
        first_copies[name, box] = value
        whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))[tuple(map(slice, *box))].copy_(value)
    return whole, apart, max(padding for _, padding in everyone)


def relative_error(measured: Tensor, expected: Tensor) -> float:
    """Return |measured - expected| / |expected|, Euclidean norms; 0 when equal. The tensors [...] have equal shapes."""
    difference = (measured - expected).norm().item()
    return difference and difference / max(expected.norm().item(), torch.finfo(torch.float64).tiny)


def _gather(mine: object, layout: Layout) -> list[Any] | None:
    everyone: list[Any] | None = [None] * layout.world_size if layout.world_rank == 0 else None
    dist.gather_object(mine, everyone, dst=0, group=layout.cpu_group)
    return everyone
