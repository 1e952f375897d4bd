"""The arguments of a pass over an LM head's tokens, shared by the chunked pass in torch and the fused one in Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megagrpo.policy.lm_head.vocab_shard import VocabShard
from megagrpo.types import Truncation

LOGPROBS, ENTROPY, KL = range(3)  # indices of the outputs
Upstream = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class HeadTask:
    """The arguments of a pass over N tokens, besides the two tensors that get gradients. They are those of
    `vocab_logprobs`."""

    labels: Tensor  # [N] int64, ids in the full vocabulary
    shard: VocabShard
    temperature: float
    logit_cap: float | None
    truncation: Truncation
    chunk: int  # tokens whose logits exist at a time
    entropy_gradient: bool
    upstream: Upstream | None  # None: no gradients ahead of the backward pass
    ref: tuple[Tensor, Tensor] | None = None  # the reference's hidden states [N, H] and head [V/tp, H], for an exact KL
    reverse: bool = False  # the direction of the KL
    fused: bool = False
    fp8: str | None = None
    # [1] bool on the device: set where upstream's gradients differ from the actual ones
    early_differs: Tensor | None = None
    into_main_grad: bool = False  # add the gradient of a bfloat16 head to its float32 `main_grad`

    @property
    def num_outputs(self) -> int:
        """Number of outputs: logprobs, entropy, and kl with a reference."""
        return 2 if self.ref is None else 3

    @property
    def differentiable(self) -> list[int]:
        """Indices of the outputs that have a gradient."""
        return [index for index in range(self.num_outputs) if index != ENTROPY or self.entropy_gradient]

    @property
    def num_results(self) -> int:
        """Number of values stored per token: the outputs, a log-normaliser of each model, and with a truncation the
        smallest kept logit."""
        return 2 * self.num_outputs - 1 + bool(self.truncation)
