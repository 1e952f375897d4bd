"""The reference model: the policy's first weights, run through the policy's own modules by swapping storage. No second model is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.types import RefHead, TrainBatch


class Reference:
    """A frozen copy of this rank's weights that are trained, in the compute dtype and on the same device (2 or 4 bytes per local
    parameter). With LoRA these are the adapters; fresh ones add nothing, so the reference is the model itself, and no copy of it."""

    def __init__(self, policy: MegatronPolicy):
        self._policy = policy
        self._weights = [p.detach().clone() for p in self._parameters()]

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """The batch with what its KL term needs: the reference's log-probs, or for a full_ estimator its hidden states at the loss tokens
        (N x H elements per micro-batch, kept on the last pipeline stage until the batch is dropped)."""
        if self._policy.config.algorithm.full_kl:
            return batch.with_ref_heads(self.heads(batch))
        return batch.with_logprobs(ref=self.logprobs(batch))

    def heads(self, batch: TrainBatch) -> list[RefHead | None]:
        """As `MegatronPolicy.heads`, of the reference."""
        with self._swapped():
            return self._policy.heads(batch)

    def logprobs(self, batch: TrainBatch) -> list[Tensor | None]:
        """As `MegatronPolicy.logprobs`, of the reference."""
        with self._swapped():
            return self._policy.logprobs(batch)

    def _parameters(self) -> list[Tensor]:
        return [p for chunk in self._policy.chunks for p in chunk.parameters() if p.requires_grad]

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """The modules see the reference's storage inside, the policy's again outside, whatever is raised. Nothing is copied."""
        parameters = self._parameters()
        own = [p.data for p in parameters]
        try:
            for parameter, weight in zip(parameters, self._weights, strict=True):
                parameter.data = weight
            yield
        finally:
            for parameter, weight in zip(parameters, own, strict=True):
                parameter.data = weight
