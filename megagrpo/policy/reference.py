"""The reference model: weights of its own, run through the policy's modules by swapping storage. No second model is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megagrpo.parallel.layout import Layout
from megagrpo.policy.fp8.weights import copied
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.model_state import dense_state, load_state, sharded_state
from megagrpo.types import MicroBatch, RefHead, TrainBatch

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace  # isort: skip  (after megagrpo.device)
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # isort: skip
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding  # isort: skip


class Reference:
    """A copy of this rank's weights that are trained, as they are now, in the compute dtype and on the same device (2 or 4 bytes per local
    parameter). With LoRA these are the adapters; fresh ones add nothing, so the reference is the model itself, and no copy of it.

    It stays as it is but for `mix_in`, and for what `load_state_dict` takes over of one that had moved; `times_moved` counts both.
    `weights` are in the order of the policy's parameters."""

    def __init__(self, policy: MegatronPolicy):
        self._policy = policy
        self.weights = [copied(p) for p in self._parameters()]
        self.times_moved = 0

    @property
    def moved(self) -> bool:
        """Whether it is another one than at first."""
        return self.times_moved > 0

    @torch.no_grad()
    def mix_in(self, alpha: float) -> None:
        """reference = (1 - alpha) reference + alpha policy, computed in float32 and rounded once (Gorbatovski et al. 2024,
        arXiv 2404.09656, as TRL has it). Elementwise: every copy of a weight moves alike."""
        for weight, parameter in zip(self.weights, self._parameters(), strict=True):
            weight.copy_(weight.float().mul_(1 - alpha).add_(parameter.float(), alpha=alpha))
        self.times_moved += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy's modules are the reference inside, the policy again outside, whatever is raised. Nothing is copied."""
        parameters = self._parameters()
        own = [p.detach() for p in parameters]
        try:
            for parameter, weight in zip(parameters, self.weights, strict=True):
                parameter.data = weight
            yield
        finally:
            for parameter, weight in zip(parameters, own, strict=True):
                parameter.data = weight

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """The batch with what its KL term needs: the reference's log-probs, or for a full_ estimator its hidden states at the loss tokens
        (N x H elements per micro-batch, kept on the last pipeline stage until the batch is dropped)."""
        if self._policy.config.algorithm.full_kl:
            return batch.with_ref_heads(self.heads(batch))
        return batch.with_logprobs(ref=self.logprobs(batch))

    def heads(self, batch: TrainBatch) -> list[RefHead | None]:
        """As `MegatronPolicy.heads`, of the reference."""
        with self.in_place():
            return self._policy.heads(batch)

    def logprobs(self, batch: TrainBatch) -> list[Tensor | None]:
        """As `MegatronPolicy.logprobs`, of the reference."""
        with self.in_place():
            return self._policy.logprobs(batch)

    def _parameters(self) -> list[Tensor]:
        return [p for chunk in self._policy.chunks for p in chunk.parameters() if p.requires_grad]

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """As Megatron's of each model chunk, with the reference's storage under keys of its own."""

        def hold(entry: Any) -> Any:
            if isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
                entry.data = entry.data.detach()  # of the parameter, which is about to be the policy's again
            return entry

        with self.in_place():
            states = {str(i): dense_state(sharded_state(chunk, metadata)) for i, chunk in enumerate(self._policy.chunks)}
            dict_list_map_inplace(hold, states)
        add_prefix_for_sharding(states, "reference.")
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Take over what a checkpoint held of a reference that had moved."""
        with self.in_place():
            for i, chunk in enumerate(self._policy.chunks):
                load_state(chunk, states[str(i)])
        self.times_moved += 1


def kl_by_sample(batches: Sequence[TrainBatch], layout: Layout) -> Tensor:
    """[N] float64: log(policy / reference) of each of the step's samples, summed over its response tokens: k1 of the whole response. On
    every rank, from batches with old and ref log-probs. Collective."""
    total = torch.zeros(sum(batch.num_sequences for batch in batches), dtype=torch.float64)
    if layout.is_last_stage and layout.tp_rank == 0 and layout.cp_rank == 0:  # the others have the same log-probs, or none
        for micro_batch in [m for batch in batches for m in batch.micro_batches]:
            _add_kl(total, micro_batch)
    return torch.stack(layout.all_gather_objects(total)).sum(0)


def _add_kl(total: Tensor, micro_batch: MicroBatch) -> None:
    m = micro_batch.to(total.device)
    sample = m.samples.repeat_interleave(m.cu_seqlens.diff().long())
    total.index_add_(0, sample[m.loss_mask], (m.old_logprobs - m.ref_logprobs)[m.loss_mask].double())
