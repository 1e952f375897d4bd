"""The arguments of a pass over an LM head's tokens, shared by the chunked pass in torch and the fused one in Triton;
and the gradient of a loss with respect to the head's outputs, computed before the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.config import RolloutSection, RunConfig
from megagrpo.data.grammar import Grammar
from megagrpo.models.families.architecture import HfConfig
from megagrpo.platform.parallel.context import RankBatch
from megagrpo.policy.lm_head.logit_processors import LogitProcessors, runs_of
from megagrpo.policy.lm_head.vocab_shard import VocabShard
from megagrpo.train_types import LossFn, LossInputs, MicroBatch, RefHead
from megagrpo.types import NO_TRUNCATION, Penalties, Truncation

LOGPROBS, ENTROPY, KL = range(3)  # indices of the outputs
DIRECTIONS = ("forward", "reverse")
Upstream = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class HeadTask:
    """The arguments of `vocab_logprobs` for N tokens, besides the two tensors that get gradients. Raises ValueError for
    another direction of the KL.

    The logits of a token are hidden weight^T, then cap tanh(x / cap) with a cap, then as `processors` change them, then
    / temperature. All ranks of
    `group` must pass the same N.
    """

    labels: Tensor  # [N] int64, ids in the full vocabulary
    group: dist.ProcessGroup | None = None  # the tensor-parallel ranks; None: one rank holds all rows of the head
    temperature: float | Tensor = 1.0  # or that of each token, [N]
    logit_cap: float | None = None
    vocab_size: int | None = None  # rows of the head at or above it are padding with probability 0; None: no padding
    processors: LogitProcessors | None = None  # change logits after the cap and before the temperature
    truncation: Truncation = NO_TRUNCATION  # the softmax is over the tokens that these rules keep, and the label
    chunk: int = 256  # tokens whose logits exist at a time, of each model
    entropy_gradient: bool = False  # whether the gradient flows through the entropy too
    # Computes, ahead of the backward pass, the gradients [n] of the differentiable outputs from their values:
    # `upstream(rows, logprobs)`, with more arguments for the entropy with `entropy_gradient` and the KL with `ref`.
    upstream: Upstream | None = None
    # [1] bool on the device: set where upstream's gradients differ from the actual ones
    early_differs: Tensor | None = None
    into_main_grad: bool = False  # add the gradient of `weight` to its float32 `main_grad`, Megatron's sum, unrounded
    fused: bool = False  # Triton kernels, which choose their own chunk
    fp8: str | None = None  # the kernels multiply FP8: "tensorwise" or "blockwise"
    ref: RefHead | None = None  # the reference's hidden states [N, H] and head [V/tp, H], for an exact KL
    direction: str = "reverse"  # of the KL: reverse is KL(policy || reference), forward KL(reference || policy)

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction: {self.direction!r} is not one of {', '.join(DIRECTIONS)}")

    @classmethod
    def of(
        cls, config: RunConfig, hf_config: HfConfig, item: RankBatch, grammar: Grammar | None = None, **of_rank: Any
    ) -> HeadTask:
        """Return the task of a run's keys for the N loss tokens of this rank's part of a micro-batch; `of_rank` are the
        fields that depend on the rank, `grammar` that of `rollout.structured_outputs`."""
        rollout, train, micro_batch, tokens = config.rollout, config.train, item.micro_batch, item.indices[item.loss]
        temperature: float | Tensor = rollout.temperature
        if micro_batch.temperatures is not None:
            own = micro_batch.temperatures[tokens]
            temperature = torch.where(own.isnan(), temperature, own)
        return cls(
            micro_batch.labels[tokens],
            temperature=temperature,
            logit_cap=hf_config.logit_cap,
            vocab_size=hf_config.vocab_size,
            processors=_processors(rollout, item, grammar) if rollout.processes_logits else None,
            truncation=Truncation(rollout.top_p, rollout.top_k, rollout.min_p),
            chunk=train.logprob_chunk,
            fused=train.fused_logprobs,
            fp8=None if train.logprobs_fp8_recipe == "none" else train.logprobs_fp8_recipe,
            **of_rank,
        )

    def temperature_of(self, rows: slice) -> float | Tensor:
        """Return the temperature of the tokens `rows`; [n, 1] if each token has its own."""
        return self.temperature[rows, None] if isinstance(self.temperature, Tensor) else self.temperature

    def shard(self, weight: Tensor) -> VocabShard:
        """Return this rank's shard of the vocabulary, whose head is `weight` [V/tp, H]."""
        return VocabShard.of(weight, self.group, self.vocab_size)

    @property
    def reverse(self) -> bool:
        """Whether there is a KL, and it is KL(policy || reference)."""
        return self.ref is not None and self.direction == "reverse"

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
        """Number of values per token: outputs, log-normaliser per model and, if truncated, the smallest kept logit."""
        return 2 * self.num_outputs - 1 + bool(self.truncation)


def _processors(rollout: RolloutSection, item: RankBatch, grammar: Grammar | None) -> LogitProcessors:
    penalties = Penalties(rollout.repetition_penalty, rollout.frequency_penalty, rollout.presence_penalty)
    runs = runs_of(item.on_host, item.on_host_tokens) if penalties or grammar is not None else ()
    return LogitProcessors(tuple(rollout.logit_bias.items()), penalties, tuple(runs), grammar)


@torch.enable_grad()
def loss_gradients(
    loss_fn: LossFn, denominator: int, micro_batch: MicroBatch, positions: Tensor, rows: slice, *outputs: Tensor
) -> tuple[Tensor, ...]:
    """Return d (loss / denominator) / d (logprobs, entropy, kl) [n] float32 at tokens `positions[rows]`, from their
    values `outputs` [n], before the backward pass.

    `positions` [N] int64 are the loss tokens in the pack. Entropy is included only with `entropy_weights`, KL only with
    a reference head. Only for losses whose gradient at a token depends on that token alone.
    """
    leaves = [
        row.new_zeros(micro_batch.num_tokens).index_copy(0, positions[rows], row).requires_grad_() for row in outputs
    ]
    logprobs, *others = leaves
    entropy = others.pop(0) if micro_batch.terms.entropy_weights is not None else torch.zeros_like(logprobs)
    share = loss_fn(LossInputs(logprobs, entropy, micro_batch, *others)).numerator / denominator
    return tuple(gradient[positions[rows]] for gradient in torch.autograd.grad(share, leaves, materialize_grads=True))
