"""The policy: a Megatron-Core model in any TP x CP x PP x DP layout that computes log-probs and optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

import megagrpo.platform.device as device
from megagrpo.config import RunConfig
from megagrpo.data.tokens.grammar import Grammars
from megagrpo.data.tokens.sampling import sampling_of
from megagrpo.families.hf_config import HfConfig
from megagrpo.platform.parallel.context import RankBatch, gather_rows
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.phases import Phases
from megagrpo.policy.attention.packed import pack_params
from megagrpo.policy.build import build_model, head_input, hidden_states, lm_head, model_options
from megagrpo.policy.device_checks import check_fused
from megagrpo.policy.find_nan import BadTensor, GradientCheck, NonFiniteError, bad_weight, first_cause
from megagrpo.policy.fp8.masters import drop_unrounded
from megagrpo.policy.images.image_inputs import inputs_of, shares_prompts
from megagrpo.policy.layers.embedding import add_gradients_directly
from megagrpo.policy.layers.megatron_modules import config_of
from megagrpo.policy.lm_head.task import HeadTask, Upstream, loss_gradients
from megagrpo.policy.lm_head.top_logprobs import top_logprobs
from megagrpo.policy.lm_head.vocab_logprobs import rows_with_others
from megagrpo.policy.lora.lora_layers import attach_adapters, without_dropout
from megagrpo.policy.lora.quantized_base import store_weights
from megagrpo.policy.metric_sums import MetricsOfRanks, merged, on_host
from megagrpo.policy.moe.router_losses import RouterTerms, freeze_routers
from megagrpo.policy.moe.routing_replay import NO_REPLAY, RoutingReplay
from megagrpo.policy.optimizer.loss_scale import LossScale
from megagrpo.policy.optimizer.policy_optimizer import (
    build_optimizer,
    build_scheduler,
    gather_weights,
    masters_from_weights,
    overlaps_reduction,
    weights_from_masters,
    wrap_data_parallel,
)
from megagrpo.policy.transformer.activation_offload import offload_activations
from megagrpo.policy.transformer.message_overlap import prepare_overlap
from megagrpo.train_types import LossFn, LossInputs, Metric, MicroBatch, RefHead, TopLogprobs, TrainBatch


class MegatronPolicy:
    """The trained model of this rank, with its optimizer and learning-rate schedule.

    `chunks` are the bare chunks (several with virtual pipeline stages); `model` holds them wrapped with gradient
    buffers. With `shares_prompts` the samples of a batch may share one copy of their prompt. With LoRA only adapters
    have gradients and optimizer state. All weights and adapters are uninitialised until the caller loads them.
    With `frozen` it only scores: it has no gradients, optimizer or schedule.
    """

    def __init__(self, config: RunConfig, layout: Layout, hf_config: HfConfig, frozen: bool = False):
        self.config, self.layout, self.hf_config = config, layout, hf_config
        self.dtype = device.resolve_precision(config.model.precision)
        self.shares_prompts = shares_prompts(config, hf_config)
        device.reuse_freed_memory()
        self.chunks = self._build_chunks()
        self.inputs = inputs_of(self.chunks, hf_config, layout, config.data.images)
        prepare_overlap(config, self.chunks)
        if config.model.offload_activations:
            offload_activations(self.chunks, config.model.offload_activations)
        if config.lora.enabled:
            attach_adapters(self.chunks, hf_config, config.lora, config.model.recompute)
        if config.model.base_storage != "none":
            store_weights(self.chunks, config.model.base_storage)
        if config.train.freeze_moe_router:
            freeze_routers(self.chunks)
        self._schedule = get_forward_backward_func()
        self._metrics = MetricsOfRanks(layout)
        self.phases = Phases()  # of the run; replaced by the caller
        self.sampling = sampling_of(config.rollout)  # both are set by a caller with a tokenizer
        self.grammars: Grammars | None = None
        self.times_filled = 0  # number of calls of weights_changed
        self._early_differs = torch.zeros(1, dtype=torch.bool, device=device.device())
        self._into_main_grad = self._early = False
        self.replay: RoutingReplay = NO_REPLAY
        self.model: list[Any] = [chunk.requires_grad_(False) for chunk in self.chunks] if frozen else []
        if not frozen:
            self._prepare_training()

    def _prepare_training(self) -> None:
        config, layout, hf_config = self.config, self.layout, self.hf_config
        self.model = wrap_data_parallel(self.chunks, config.train, layout, config.model.fp8_param)
        # Hooks of an overlapped reduction need each gradient in the weight's dtype. In float32 the option changes no
        # bit of a step, so several replicas add gradients in the order of the hooks.
        direct = self.dtype != torch.float32 and not overlaps_reduction(config.train, layout.dp_cp_size)
        self._into_main_grad = direct or layout.dp_cp_size == 1
        if self._into_main_grad:
            add_gradients_directly(self.chunks)
        self.optimizer = build_optimizer(self.model, config.train, self.dtype)
        self.scheduler = build_scheduler(
            self.optimizer, config.train, config.run.num_steps * config.algorithm.updates_per_step
        )
        check_fused(config.train, config.algorithm, config.rollout.truncates, self.dtype, hf_config.hidden_size)
        self.loss_scale = LossScale(self.dtype)
        self.replay = RoutingReplay(self.chunks, hf_config) if config.rollout.routing_replay != "off" else NO_REPLAY
        self._routers = RouterTerms(self.chunks, config.algorithm, layout)
        for chunk in self.chunks:
            config_of(chunk).grad_scale_func = self.loss_scale.scaled
            config_of(chunk).finalize_model_grads_func = self._finalize_gradients
        self._checks: list[GradientCheck] = []  # of the step in progress
        # whether loss gradients may be computed before the backward pass; `_early_differs`: whether one was wrong there
        self._early = self._early_is_right = config.algorithm.gradient_is_local

    def _build_chunks(self) -> list[torch.nn.Module]:
        own = self.hf_config, self.dtype, self.shares_prompts
        return build_model(self.hf_config, self.layout, model_options(self.config, *own))

    def weights_changed(self) -> None:
        """Tell the policy that its weights, frozen ones included, were written from outside. The optimizer copies its
        float32 masters from them again."""
        self.times_filled += 1
        masters_from_weights(self.optimizer, self.config.model.fp8_param)
        drop_unrounded(self.chunks)

    def masters_changed(self) -> None:
        """Tell the policy of float32 masters written from outside: bf16 and FP8 weights are rounded from them again.

        FP8 weights need this because a checkpoint holds less precision than the masters. Collective.
        """
        drop_unrounded(self.chunks)
        if self.dtype != torch.float32:
            weights_from_masters(self.optimizer, self.model)

    def logprobs(self, batch: TrainBatch) -> list[Tensor | None]:
        """Return the log-probs [T] float32 of every micro-batch's labels, 0 where the loss mask is 0.

        Only the last pipeline stage computes losses. Each of its ranks, every context-parallel rank included, returns
        whole rows; other stages return None.
        """
        return self._collect(batch, lambda *last: self._loss_inputs(*last).policy_logprobs)

    def entropies(self, batch: TrainBatch) -> list[Tensor | None]:
        """Return the entropies [T] float32 in nats at every micro-batch's labels, 0 where the loss mask is 0; None
        outside the last pipeline stage."""
        return self._collect(batch, lambda *last: self._loss_inputs(*last).entropy)

    def top_logprobs(self, batch: TrainBatch, k: int) -> list[TopLogprobs | None]:
        """Return the k largest log-probs [T, k] float32 at every micro-batch's labels and their token ids [T, k], both
        0 where the loss mask is 0; None outside the last pipeline stage.

        They cover the whole vocabulary at the sampling temperature. Raises ValueError for k below 1 or above its size.
        """

        def collect(hidden: Tensor, item: RankBatch, chunk: torch.nn.Module) -> TopLogprobs:
            states = head_input(chunk, hidden).index_select(0, item.loss)
            task = self._head_task(item)
            top = top_logprobs(states, lm_head(chunk), k, task)
            return TopLogprobs(*(self._whole_rows(rows.t(), item).t() for rows in (top.logprobs, top.token_ids)))

        return self._collect(batch, collect)

    def heads(self, batch: TrainBatch, whole: bool = False) -> list[RefHead | None]:
        """Return the LM head's inputs for every micro-batch's loss tokens on the last pipeline stage; None on others.
        With `whole` the hidden states are those of the loss tokens of all context-parallel ranks.

        `RefHead.weight` is the head's own storage, not a copy.
        """

        def collect(hidden: Tensor, item: RankBatch, chunk: torch.nn.Module) -> RefHead:
            states = head_input(chunk, hidden).index_select(0, item.loss)
            if whole:
                states = self._whole_rows(states.t(), item).t()[item.micro_batch.loss_mask]
            return RefHead(states, lm_head(chunk).detach(), self.hf_config.logit_cap)

        return self._collect(batch, collect)

    @torch.no_grad()
    def _collect(self, batch: TrainBatch, collect: Callable[[Tensor, RankBatch, torch.nn.Module], Any]) -> list[Any]:
        """Run the micro-batches forward and return `collect`'s results for last-stage hidden states; None elsewhere."""

        def last_stage(output: Tensor, item: RankBatch, chunk: torch.nn.Module, non_loss_data: bool) -> Any:
            return collect(output, item, chunk)

        with (
            without_dropout(self.chunks),
            self._schedule_arguments(batch.micro_batches, last_stage, forward_only=True) as arguments,
        ):
            rows = self._schedule(**arguments)
        return rows if self.layout.is_last_stage else [None] * len(batch.micro_batches)

    def train_step(self, batch: TrainBatch, loss_fn: LossFn, denominator: int) -> dict[str, Metric]:
        """Take one optimizer step, `backward` and `update`, on the sum of `loss_fn` over all ranks' micro-batches
        divided by `denominator`; return metrics of the whole step.

        Raises NonFiniteError; weights, optimizer and learning-rate schedule are then unchanged.
        """
        metrics = self.backward(batch, loss_fn, denominator) | self.update()
        self.finish_updates()
        return metrics

    def backward(self, batch: TrainBatch, loss_fn: LossFn, denominator: int) -> dict[str, Metric]:
        """Compute `train_step`'s gradient in the parameters' float32 `main_grad`; return the step's loss and metrics.

        With the distributed optimizer each data-parallel rank holds its own shard of the summed gradient. Raises
        NonFiniteError on every rank when the loss or a gradient is NaN or infinite on any rank.
        """

        scaled = denominator / self.loss_scale.value  # of the backward pass, which starts at the scaled loss
        early = partial(loss_gradients, loss_fn, scaled) if self._early else None

        def loss(output: Tensor, item: RankBatch, chunk: torch.nn.Module) -> tuple[Tensor, Tensor, dict[str, Metric]]:
            result = loss_fn(self._loss_inputs(output, item, chunk, early))
            share = result.numerator / denominator
            # Megatron divides by the second value, which it sums. Our denominator also counts skipped samples, and is
            # known before.
            return share, torch.ones((), dtype=torch.int), {"loss": Metric(share.detach())} | result.metrics

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._early_differs.zero_()
        self._routers.begin(partial(self._forward, batch))
        with self._schedule_arguments(batch.micro_batches, loss, forward_only=False) as arguments:
            per_micro_batch = self._schedule(**arguments)
        metrics, bad, early_differs = self._reduce_metrics(per_micro_batch)
        # the loss's gradient at a token depends on other tokens, although the loss says that it does not
        if early_differs:
            self._early = False
            return self.backward(batch, loss_fn, denominator)
        if self._early_is_right and not self._early:
            metrics["train/late_gradients"] = Metric(1.0)
        metrics["loss"] = Metric(metrics["loss"].sum)
        finite = math.isfinite(metrics["loss"].value)
        if finite and self.loss_scale.update(bad is not None):
            return self.backward(batch, loss_fn, denominator)
        if bad is not None or not finite:
            raise NonFiniteError(bad, metrics, self.loss_scale.exhausted if bad else "")
        return metrics | self.loss_scale.metrics() | self._routers.metrics | self.replay.metrics(self.layout)

    def losses(self, batch: TrainBatch, loss_fn: LossFn) -> dict[str, Metric]:
        """Return the sum of `loss_fn` over all ranks' micro-batches as `loss`, and its metrics, without a gradient.
        Collective."""

        def collect(*last: Any) -> dict[str, Metric]:
            result = loss_fn(self._loss_inputs(*last))
            return {"loss": Metric(result.numerator)} | result.metrics

        parts, layout = self._collect(batch, collect), self.layout
        counts = layout.is_last_stage and layout.tp_rank == 0 and layout.cp_rank == 0
        host, _ = on_host(parts if counts else [])
        return self._metrics.merge(merged(host))[0]

    def _forward(self, batch: TrainBatch) -> None:
        """Run the micro-batches forward, up to the final hidden states, with the routes of the step."""
        with self._schedule_arguments(
            batch.micro_batches, lambda *args, **kwargs: None, forward_only=True
        ) as arguments:
            self._schedule(**arguments)

    def update(self) -> dict[str, Metric]:
        """Clip the gradient of `backward` and take one step of the learning-rate schedule, then of the optimizer, and
        move the routers' selection biases. Return the gradient norm before the clip and the rate of this step."""
        self.scheduler.step(increment=1)
        with self.phases("optimizer"):
            _, grad_norm, _ = self.optimizer.step()
            self._routers.update_biases()
        norm = {} if grad_norm is None else {"grad_norm": Metric(float(grad_norm))}
        return norm | {"learning_rate": Metric(float(self.optimizer.param_groups[0]["lr"]), reduce="last")}

    def finish_updates(self) -> None:
        """Complete the weights after the last `update` before anything but a forward pass reads them. Collective."""
        gather_weights(self.model)

    @contextmanager
    def _schedule_arguments(
        self, micro_batches: Sequence[MicroBatch], last_stage: Callable[..., Any], forward_only: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the arguments of Megatron's pipeline schedule for one pass over the micro-batches, which must run
        inside this context. `last_stage` turns the final hidden states into the values that the schedule returns.
        Raises ValueError for a micro-batch with `inputs` that the policy cannot read."""
        self.inputs.begin(micro_batches)

        def forward_step(iterator: Iterator[RankBatch], model: Any, return_schedule_plan: bool = False) -> Any:
            item = next(iterator)
            micro_batch, indices = item.micro_batch, item.indices
            positions, own = micro_batch.position_ids[indices], indices if self.layout.parallel.cp > 1 else None
            packed = pack_params(micro_batch.cu_seqlens, micro_batch.prefixes, own, positions)
            self.inputs.give(model, item.on_host, packed)
            counts, routes = self.config.algorithm.counts_in_routers, micro_batch.routes
            asked = counts or routes is not None
            counted = self._of_layers(micro_batch.loss_mask[indices]) if asked else None
            with self.replay.forward(model, routes, counted):
                output = (model.build_schedule_plan if return_schedule_plan else model)(
                    input_ids=micro_batch.token_ids[indices][None],
                    position_ids=positions[None],
                    attention_mask=None,
                    packed_seq_params=packed,
                    # of routers that sum over tokens: True where a token is not in the loss
                    padding_mask=~counted[None] if counted is not None and counts else None,
                )
            self.phases.task.advance(1 / len(self.model))
            return output, partial(last_stage, item=item, chunk=model)

        moved = [RankBatch.of(m, self.layout.parallel.cp, self.layout.cp_rank, device.device()) for m in micro_batches]
        iterators = [iter(moved) for _ in self.model]
        single = len(self.model) == 1
        self.phases.task.expect(len(moved), "micro-batches")
        with hidden_states(self.chunks), self.replay.passing(trains=not forward_only):
            yield dict(
                forward_step_func=forward_step,
                data_iterator=iterators[0] if single else iterators,
                model=self.model[0] if single else self.model,
                num_microbatches=len(moved),
                seq_length=max(m.num_tokens for m in micro_batches),
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _of_layers(self, rows: Tensor) -> Tensor:
        """Return the part of rows [T/cp] for the tokens that this rank's layers compute outside of attention."""
        p = self.config.parallel
        return rows.chunk(p.tp)[self.layout.tp_rank] if p.sequence_parallel else rows

    def _loss_inputs(
        self, hidden: Tensor, item: RankBatch, chunk: torch.nn.Module, early: Upstream | None = None
    ) -> LossInputs:
        """Compute log-probs, entropy and exact KL of a micro-batch, [T] each, from the last stage's hidden states.

        Where the loss mask is 0 they are 0 and no logits are computed. With `early`, for a loss whose gradient is
        local, the loss gradient is computed ahead of the backward pass, which saves a matrix product.

        Context parallelism ends here and nowhere else: each rank computes its own tokens, and every rank gets all rows.
        """
        micro_batch, tokens = item.micro_batch, item.indices[item.loss]
        states, terms = head_input(chunk, hidden).index_select(0, item.loss), micro_batch.terms
        task = replace(
            self._head_task(item),
            entropy_gradient=terms.entropy_weights is not None,
            upstream=None if early is None else partial(early, micro_batch, tokens),
        )
        others = terms.others(self.config.algorithm.kl_estimator.removeprefix("full_"), tokens)
        rows = torch.stack(rows_with_others(states, lm_head(chunk), task, others))
        logprobs, entropy, *divergences = self._whole_rows(rows, item)
        entropy = entropy if task.entropy_gradient else entropy.detach()
        return LossInputs.of(logprobs, entropy, micro_batch, divergences)

    def _head_task(self, item: RankBatch) -> HeadTask:
        """Return the settings of the LM head's passes over the loss tokens of this rank's part of a micro-batch."""
        own = dict(group=self.layout.tp_group, early_differs=self._early_differs, into_main_grad=self._into_main_grad)
        return HeadTask.of(self.config, self.hf_config, item, self.sampling, self.grammars, **own)

    def _whole_rows(self, rows: Tensor, item: RankBatch) -> Tensor:
        """Return rows [..., N] of this rank's loss tokens as rows [..., T] of the micro-batch, 0 at other tokens."""
        spread = rows.new_zeros(*rows.shape[:-1], item.indices.numel()).index_copy(-1, item.loss, rows)
        return gather_rows(spread, item.indices, item.pack_order, self.layout.cp_group)

    def _finalize_gradients(
        self, model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any
    ) -> None:
        """Run Megatron's reductions over DP, tied embeddings and sequence-parallel norms, and check the gradients.

        `num_tokens`, the sum of the second values that the loss returns to Megatron, is not used.
        """
        # An overlapped reduction spreads a NaN to every replica during the backward pass, which hides the rank it came
        # from.
        reduced = self.layout.world_size > 1  # one rank's gradients are its sums
        summing = not reduced or overlaps_reduction(self.config.train, self.layout.dp_cp_size)
        self._checks = [] if summing else [GradientCheck.of(self.chunks, summed=False)]
        finalize_model_grads(model, None, **kwargs)
        self.loss_scale.divide_out(self.model)
        self._checks.append(GradientCheck.of(self.chunks, summed=reduced))

    def _bad_tensor(self, finite: Sequence[Sequence[bool]]) -> BadTensor | None:
        """Return the tensor to blame on this rank if a gradient is not finite: the first bad weight, else the first bad
        gradient; None if all are finite. `finite` are the results of this step's checks."""
        where = (self.layout.pp_rank, self.layout.world_rank)
        bad = (check.first_bad(flags, *where) for check, flags in zip(self._checks, finite, strict=True))
        gradient = next(filter(None, bad), None)
        return gradient and (bad_weight(self.chunks, *where) or gradient)

    def _reduce_metrics(
        self, per_micro_batch: list[dict[str, Metric]]
    ) -> tuple[dict[str, Metric], BadTensor | None, bool]:
        """Sum the metrics of this rank's micro-batches, then over data-parallel ranks; every rank gets equal results.

        A metric with a count of 0 is left out: when no sample counts, the entropy is absent, not 0. The second result
        is the tensor to blame when a gradient of any rank is not finite. The third is whether a gradient that was
        computed early is wrong on any rank.
        This is the step's only transfer to the host before the optimizer.
        """
        layout = self.layout
        # the other ranks computed the same losses
        counts = layout.is_last_stage and layout.tp_rank == 0 and layout.cp_rank == 0
        host, flags = on_host(
            per_micro_batch if counts else [], self._early_differs, *(check.finite for check in self._checks)
        )
        (differs,), *finite = flags
        own_bad = self._bad_tensor(finite)
        everyone, (bad, differs) = self._metrics.merge(merged(host), own_bad is not None, differs)
        metrics = {name: metric for name, metric in everyone.items() if metric.count}
        return metrics, first_cause(layout.all_gather_objects(own_bad)) if bad else None, differs
