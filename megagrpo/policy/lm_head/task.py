"""The arguments of a pass over an LM head's tokens, shared by the chunked pass in torch and the fused one in Triton;
and the gradient of a loss with respect to the head's outputs, computed before the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.config import RunConfig
from megagrpo.data.tokens.grammar import Grammars
from megagrpo.data.tokens.sampling import own_sampling
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.platform.parallel.context import RankBatch
from megagrpo.policy.lm_head.divergence import Divergence
from megagrpo.policy.lm_head.logit_processors import LogitProcessors, runs_of
from megagrpo.policy.lm_head.vocab_shard import VocabShard
from megagrpo.policy.lm_head.vocab_truncation import TruncationsOfTokens
from megagrpo.train_types import LossFn, LossInputs, MicroBatch, RefHead, TopLogprobs, moved
from megagrpo.types import NO_TRUNCATION, SamplingParams, Truncation

LOGPROBS, ENTROPY, KL = range(3)  # indices of the outputs
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
    # the softmax is over the tokens that these rules keep, and the label
    truncation: Truncation | TruncationsOfTokens = NO_TRUNCATION
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
    # the other model's hidden states [N, H] and head [V/tp, H], for an exact KL, or its most likely tokens
    ref: RefHead | TopLogprobs | None = None
    direction: str = "reverse"  # of the KL: reverse is KL(policy || other), forward KL(other || policy), or a mixture
    mix: float = 0.5  # of a direction with a mixture

    @cached_property
    def divergence(self) -> Divergence:
        """The divergence of `direction`."""
        return Divergence.of(self.direction, self.mix)

    def __post_init__(self) -> None:
        Divergence.of(self.direction, self.mix)

    @classmethod
    def of(
        cls,
        config: RunConfig,
        hf_config: HfConfig,
        item: RankBatch,
        sampling: SamplingParams,
        grammars: Grammars | None = None,
        **of_rank: Any,
    ) -> HeadTask:
        """Return the task of a run for the N loss tokens of this rank's part of a micro-batch, whose rows may change
        `sampling`. `of_rank` are the fields that depend on the rank."""
        train, micro_batch, tokens = config.train, item.micro_batch, item.indices[item.loss]
        temperature: float | Tensor = sampling.temperature
        of_sequences = [own_sampling(sampling, own) for own in micro_batch.sampling]
        if any("temperature" in own for own in micro_batch.sampling):
            own = moved(torch.tensor([s.temperature for s in of_sequences]), tokens.device)
            temperature = own[micro_batch.sequence_index[tokens]]
        of_sequences = of_sequences or [sampling] * micro_batch.num_sequences
        changes = any(s.changes_logits for s in of_sequences)
        truncation: Truncation | TruncationsOfTokens = sampling.truncation
        if any(s.truncation != truncation for s in of_sequences):
            rules = [s.truncation for s in of_sequences]
            truncation = TruncationsOfTokens.of(rules, micro_batch.sequence_index[tokens])
        return cls(
            micro_batch.labels[tokens],
            temperature=temperature,
            logit_cap=hf_config.logit_cap,
            vocab_size=hf_config.vocab_size,
            processors=_processors(item, of_sequences, grammars) if changes else None,
            truncation=truncation,
            chunk=train.logprob_chunk,
            fused=train.fused_logprobs,
            fp8=None if train.logprobs_fp8_recipe == "none" else train.logprobs_fp8_recipe,
            **of_rank,
        )

    def temperature_of(self, rows: slice) -> float | Tensor:
        """Return the temperature of the tokens `rows`; [n, 1] if each token has its own."""
        return self.temperature[rows, None] if isinstance(self.temperature, Tensor) else self.temperature

    def truncation_of(self, rows: slice) -> Truncation | TruncationsOfTokens:
        """Return the rules of the tokens `rows`."""
        return self.truncation.of_rows(rows) if isinstance(self.truncation, TruncationsOfTokens) else self.truncation

    def shard(self, weight: Tensor) -> VocabShard:
        """Return this rank's shard of the vocabulary, whose head is `weight` [V/tp, H]."""
        return VocabShard.of(weight, self.group, self.vocab_size)

    @property
    def reverse(self) -> bool:
        """Whether there is an exact KL, and it is KL(policy || other)."""
        return isinstance(self.ref, RefHead) and self.direction == "reverse"

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
        """Number of values per token: outputs, log-normaliser per model and, if truncated, the smallest kept logit, or
        the sum of slopes of a mixture or of the most likely tokens."""
        mixes = self.ref is not None and (self.divergence.mixes or isinstance(self.ref, TopLogprobs))
        return 2 * self.num_outputs - 1 + bool(self.truncation) + mixes


def _processors(item: RankBatch, of_sequences: Sequence[SamplingParams], grammars: Grammars | None) -> LogitProcessors:
    runs = runs_of(item.on_host, item.on_host_tokens, of_sequences)
    return LogitProcessors(tuple(run for run in runs if run.sampling.changes_logits), grammars)


@torch.enable_grad()
def loss_gradients(
    loss_fn: LossFn, denominator: float, micro_batch: MicroBatch, positions: Tensor, rows: slice, *outputs: Tensor
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
    share = loss_fn(LossInputs.of(logprobs, entropy, micro_batch, others)).numerator / denominator
    return tuple(gradient[positions[rows]] for gradient in torch.autograd.grad(share, leaves, materialize_grads=True))
