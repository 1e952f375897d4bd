"""The interface of models that the run does not train: the reference, and later teachers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megagrpo.types import TopLogprobs, TrainBatch


class FrozenModel(Protocol):
    """A model that scores the tokens of a batch and that no optimizer step changes.

    `policy.reference.Reference` runs through the policy's own modules. A model of another architecture, or one behind a
    server, can implement the same methods; its vocabulary must be the policy's.

    Every method returns one result per micro-batch: [T] or [T, k], label-aligned, of the distribution at the sampling
    temperature, 0 where the loss mask is 0. Results exist on all ranks of the last pipeline stage and are None on the
    others. All ranks of the world call the methods together.
    """

    def logprobs(self, batch: TrainBatch) -> list[Tensor | None]:
        """Return the log-probs [T] float32 of every micro-batch's labels."""

    def entropies(self, batch: TrainBatch) -> list[Tensor | None]:
        """Return the entropies [T] float32 in nats of the distributions of every micro-batch's labels."""

    def top_logprobs(self, batch: TrainBatch, k: int) -> list[TopLogprobs | None]:
        """Return the k largest log-probs [T, k] float32 over the whole vocabulary, and their token ids."""

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with the inputs of its KL term (`StepTerms.ref_logprobs` or `StepTerms.ref_head`)."""
