"""The reference model: its weights run through the policy's modules by swapping storage. No second model is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor

from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.fp8.tensor import copied
from megagrpo.policy.lora.quantized_base import StoredWeight
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.model_state import dense_state, load_state, sharded_state
from megagrpo.policy.moe.router_losses import selection_biases
from megagrpo.train_types import MicroBatch, RefHead, TopLogprobs, TrainBatch


class Reference:
    """A copy of this rank's trained weights at construction, in compute dtype on the same device (2 or 4 bytes each),
    and of selection biases that steps move.

    With LoRA only adapters are trained. Fresh adapters add nothing, so the reference is the base model, not copied.
    With `whole` it copies the base model too, in its stored form, and its adapters add nothing: another model.

    Its methods return one result per micro-batch: [T] or [T, k], label-aligned, of the distribution at the sampling
    temperature, 0 where the loss mask is 0; None outside the last pipeline stage. All ranks call them together.

    Only `mix_in` and `load_state_dict` change it; `times_moved` counts the calls of both. `weights` are in the order of
    the policy's parameters.
    """

    def __init__(self, policy: MegatronPolicy, whole: bool = False):
        self._policy, self._whole = policy, whole
        self.weights = [copied(p) for p in self._parameters()]
        if whole:
            for weight, parameter in zip(self.weights, self._parameters(), strict=True):
                if parameter.requires_grad:
                    weight.zero_()
        self.times_moved = 0

    @property
    def moved(self) -> bool:
        """Whether the weights differ from those at construction."""
        return self.times_moved > 0

    @torch.no_grad()
    def mix_in(self, alpha: float) -> None:
        """reference = (1 - alpha) reference + alpha policy, computed in float32 and rounded once (Gorbatovski et al.
        2024, arXiv 2404.09656, as TRL has it). Elementwise: every copy of a weight moves alike."""
        for weight, parameter in zip(self.weights, self._parameters(), strict=True):
            weight.copy_(weight.float().mul_(1 - alpha).add_(parameter.float(), alpha=alpha))
        self.times_moved += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager: inside it the policy's modules hold the reference's weights; outside, after any exception
        too, the policy's. Nothing is copied."""
        parameters = self._parameters()
        policy_weights = [p.detach() for p in parameters]
        try:
            for parameter, weight in zip(parameters, self.weights, strict=True):
                parameter.data = weight
            yield
        finally:
            for parameter, weight in zip(parameters, policy_weights, strict=True):
                parameter.data = weight

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with the inputs of its KL term: the reference's log-probs, or its hidden states at the loss
        tokens for a full_ estimator.

        Hidden states, N x H elements per micro-batch, stay on the last pipeline stage until the batch is dropped.
        """
        if self._policy.config.algorithm.full_kl:
            return batch.with_terms(ref_head=self.heads(batch))
        return batch.with_terms(ref_logprobs=self.logprobs(batch))

    def heads(self, batch: TrainBatch, whole: bool = False) -> list[RefHead | None]:
        """Return `MegatronPolicy.heads` of the reference: a `RefHead` per micro-batch on the last stage, else None."""
        with self.in_place():
            return self._policy.heads(batch, whole)

    def logprobs(self, batch: TrainBatch) -> list[Tensor | None]:
        """Return `MegatronPolicy.logprobs` of the reference: [T] float32 per micro-batch."""
        with self.in_place():
            return self._policy.logprobs(batch)

    def top_logprobs(self, batch: TrainBatch, k: int) -> list[TopLogprobs | None]:
        """Return `MegatronPolicy.top_logprobs` of the reference: [T, k] per micro-batch."""
        with self.in_place():
            return self._policy.top_logprobs(batch, k)

    def _parameters(self) -> list[Tensor]:
        """Return the policy's tensors that steps change or, with weights from elsewhere, all that may differ."""
        chunks, config = self._policy.chunks, self._policy.config
        others = self._whole or config.model.reference_path is not None
        weights: list[Tensor] = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad or others]
        if others or config.algorithm.moe_router_bias_update_rate:
            weights += selection_biases(chunks)
        stored = [module for chunk in chunks for module in chunk.modules() if self._whole]
        return weights + [part for module in stored if isinstance(module, StoredWeight) for part in module.buffers()]

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return each chunk's sharded state, with the reference's storage under keys that start with "reference."."""

        def hold(entry: Any) -> Any:
            if isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
                entry.data = entry.data.detach()  # the parameter gets the policy's storage back after `in_place`
            return entry

        with self.in_place():
            adapters_only = self._policy.config.lora.enabled
            states = {
                str(i): dense_state(sharded_state(chunk, metadata, adapters_only))
                for i, chunk in enumerate(self._policy.chunks)
            }
            dict_list_map_inplace(hold, states)
        add_prefix_for_sharding(states, "reference.")
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Load a checkpoint's reference that had moved."""
        with self.in_place():
            for i, chunk in enumerate(self._policy.chunks):
                load_state(chunk, states[str(i)], strict=not self._policy.config.lora.enabled)
        self.times_moved += 1


def kl_by_sample(batches: Sequence[TrainBatch], layout: Layout) -> Tensor:
    """Return [N] float64 per trajectory of the step: log(policy / reference) summed over its response tokens, the k1
    estimate of the whole response. Every rank gets the result. The batches need old and ref log-probs. Collective."""
    old, ref = sums_by_sample(batches, layout)
    return old - ref


def _log_probs(m: MicroBatch) -> Tensor:
    old, ref = m.terms.old_logprobs, m.terms.ref_logprobs
    assert old is not None and ref is not None, "the batch has no old or no reference log-probs"
    return torch.stack([old, ref])


def sums_by_sample(
    batches: Sequence[TrainBatch], layout: Layout, rows_of: Callable[[MicroBatch], Tensor] = _log_probs
) -> Tensor:
    """Return [2, N] float64: old and ref log-probs, or the rows [2, T] that `rows_of` returns, summed over the response
    tokens of each trajectory of the step, as `kl_by_sample` does."""
    total = torch.zeros(2, sum(batch.num_sequences for batch in batches), dtype=torch.float64)
    # the other ranks have the same rows or no rows
    if layout.is_last_stage and layout.tp_rank == 0 and layout.cp_rank == 0:
        for m in (m.to(total.device) for batch in batches for m in batch.micro_batches):
            owners = m.trajectories[m.sequence_index][m.loss_mask]
            total.index_add_(1, owners, rows_of(m)[:, m.loss_mask].double())
    return layout.all_reduce(total)
