"""Log-probs, entropy and exact KL from a vocabulary-sharded LM head, the [N, V/tp] logits never being in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megagrpo.policy.lm_head import fused_logprobs
from megagrpo.policy.lm_head.fused_logprobs import FusedPass
from megagrpo.policy.lm_head.vocab_shard import HeadGradients, Softmax, VocabShard, blocks, chunks, wide
from megagrpo.policy.lm_head.vocab_truncation import drop_below, lowest_kept
from megagrpo.types import NO_TRUNCATION, Truncation

DIRECTIONS = ("forward", "reverse")
LOGPROBS, ENTROPY, KL = range(3)  # the outputs
Upstream = Callable[..., tuple[Tensor, ...]]


def vocab_logprobs(
    hidden: Tensor,  # [N, H] float32, bfloat16 or float64
    weight: Tensor,  # [V/tp, H], the same dtype
    labels: Tensor,  # [N] int64, ids in the full vocabulary
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    logit_cap: float | None = None,
    vocab_size: int | None = None,
    truncation: Truncation = NO_TRUNCATION,
    chunk: int = 256,
    entropy_gradient: bool = False,
    upstream: Upstream | None = None,
    fused: bool = False,
    fp8: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprobs [N], entropy [N]) in nats, float32 (float64 for float64 inputs), of softmax(hidden weight^T / temperature) over the tokens
    that `truncation` keeps of it, and the label's, which was sampled. With `logit_cap` logits x become cap tanh(x / cap) before that.

    `group` are the tensor-parallel ranks (None: one rank holds all rows); all of them must call this with the same N. Rows at or above
    `vocab_size` are padding and get probability 0. The logits of `chunk` tokens exist at a time. The gradient flows through logprobs, and
    with `entropy_gradient` through entropy, to `hidden` and `weight`. That of `hidden` is this rank's share: the caller sums it over the
    group (the backward of Megatron's copy_to_tensor_model_parallel_region).

    `upstream(rows, logprobs)` may foretell the gradients ([n],) that the backward pass will bring to the log-probs [n] of tokens `rows`;
    with `entropy_gradient`, `upstream(rows, logprobs, entropy)` foretells two. Then each chunk's logits become gradients while they are at
    hand, in three matrix products, as many as with all logits kept. Without it logits are computed again in the backward pass, a fourth
    product; so they are when it brings anything else, with the same result.

    With `fused` the same comes from Triton kernels that write no logits, or into scratch of a bounded size, and round none of them
    (`megagrpo/policy/lm_head/fused_logprobs.py`); `chunk` is theirs then, and `fp8`, "tensorwise" or "blockwise", makes them
    multiply FP8. Raises ValueError where they cannot.
    """
    if fused and (reason := fused_logprobs.refusal(hidden.dtype, hidden.shape[1], bool(truncation), exact_kl=False, fp8=bool(fp8))):
        raise ValueError(f"fused log-probs: {reason}")
    assert fused or fp8 is None
    task = _Task.of(
        weight, labels, None, None, group, temperature, logit_cap, truncation, vocab_size, chunk, entropy_gradient, upstream, fused, fp8
    )
    return _VocabHead.apply(hidden, weight, task)


def vocab_logprobs_and_kl(
    hidden: Tensor,  # [N, H] of the policy; float32, bfloat16 or float64
    weight: Tensor,  # [V/tp, H] of the policy
    labels: Tensor,  # [N] int64, ids in the full vocabulary
    ref_hidden: Tensor,  # [N, H] of the reference
    ref_weight: Tensor,  # [V/tp, H] of the reference
    *,
    direction: str,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    logit_cap: float | None = None,
    vocab_size: int | None = None,
    chunk: int = 256,
    entropy_gradient: bool = False,
    upstream: Upstream | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs [N], entropy [N], kl [N]): what `vocab_logprobs` gives of the policy, and the divergence of each token's distribution.

    With p = softmax(hidden weight^T / temperature) of the policy and q of the reference, in nats, over the whole vocabulary: reverse is
    KL(p || q) = sum p log(p / q), forward is KL(q || p) = sum q log(q / p). Nothing is sampled, so value and gradient are exact. The
    gradient flows through logprobs and kl to the policy's `hidden` and `weight` as in `vocab_logprobs`; the reference gets none. The
    other arguments are those of `vocab_logprobs`: `chunk` tokens of each model, and `upstream` is also given the kl of its tokens, as the
    last, and foretells its gradient. Raises ValueError for another direction.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: {direction!r} is not one of {', '.join(DIRECTIONS)}")
    ref = ref_hidden, ref_weight
    task = _Task.of(
        weight, labels, ref, direction, group, temperature, logit_cap, NO_TRUNCATION, vocab_size, chunk, entropy_gradient, upstream
    )
    return _VocabHead.apply(hidden, weight, task)


@dataclass(frozen=True)
class _Task:
    """What a pass over the tokens needs beside the two tensors that take gradients."""

    labels: Tensor
    ref: tuple[Tensor, Tensor] | None
    reverse: bool
    shard: VocabShard
    temperature: float
    logit_cap: float | None
    truncation: Truncation
    chunk: int
    entropy_gradient: bool
    upstream: Upstream | None
    fused: bool = False
    fp8: str | None = None

    @classmethod
    def of(
        cls, weight, labels, ref, direction, group, temperature, logit_cap, truncation, vocab_size, chunk, entropy_gradient, upstream, *how
    ) -> _Task:
        shard = VocabShard.of(weight, group, vocab_size)
        upstream = upstream if torch.is_grad_enabled() else None
        reverse = direction == "reverse"
        return cls(labels, ref, reverse, shard, temperature, logit_cap, truncation, chunk, entropy_gradient, upstream, *how)

    def walk(self, hidden: Tensor, weight: Tensor, gradients: bool) -> _Pass | FusedPass:
        """Over the tokens; with `gradients` those of the logits are wanted, too."""
        return FusedPass(hidden, weight, self, keeps=gradients) if self.fused else _Pass(hidden, weight, self)

    @property
    def num_outputs(self) -> int:
        """logprobs, entropy, and kl with a reference."""
        return 2 if self.ref is None else 3

    @property
    def taught(self) -> list[int]:
        """The places among the outputs of those that take a gradient."""
        return [place for place in range(self.num_outputs) if place != ENTROPY or self.entropy_gradient]

    @property
    def num_found(self) -> int:
        """The outputs, a normaliser of each model, and the smallest logit that a truncation keeps."""
        return 2 * self.num_outputs - 1 + bool(self.truncation)


class _VocabHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, task: _Task):
        passing, num_tokens, outputs = task.walk(hidden, weight, task.upstream is not None), hidden.shape[0], task.num_outputs
        found = hidden.new_empty(task.num_found, num_tokens, dtype=wide(hidden.dtype))
        foretold = hidden.new_empty(len(task.taught), num_tokens, dtype=wide(hidden.dtype))
        gradients = None if task.upstream is None else HeadGradients(hidden, weight, task.shard, ctx.needs_input_grad[:2])
        for rows in chunks(num_tokens, passing.chunk):
            found[:, rows] = passing.forward(rows)
            if gradients is not None:
                foretold[:, rows] = torch.stack(task.upstream(rows, *(found[place, rows] for place in task.taught)))
                gradients.add(rows, passing.grad_logits(rows, found[:, rows], foretold[:, rows]))
        ctx.save_for_backward(hidden, weight, found, foretold)
        ctx.task, ctx.result = task, None if gradients is None else gradients.result()
        logprobs, entropy, *kl = (row.clone() for row in found[:outputs])
        if not task.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, *kl

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor | None):
        hidden, weight, found, foretold = ctx.saved_tensors
        upstream = torch.stack([grads[place] for place in ctx.task.taught])
        if ctx.result is not None and torch.equal(foretold, upstream):
            return *ctx.result, None
        passing = ctx.task.walk(hidden, weight, gradients=True)
        gradients = HeadGradients(hidden, weight, ctx.task.shard, ctx.needs_input_grad[:2])
        for rows in chunks(hidden.shape[0], passing.chunk):
            passing.compute_logits_again(rows, found[:, rows])
            gradients.add(rows, passing.grad_logits(rows, found[:, rows], upstream[:, rows]))
        return *gradients.result(), None


class _Pass:
    """One walk over the tokens, a chunk at a time: the logits of the chunk, and what is made of them."""

    def __init__(self, hidden: Tensor, weight: Tensor, task: _Task):
        self._task, self._policy, self.chunk = task, (hidden, weight), task.chunk
        self._memory = task.shard.memory(hidden, task.chunk)
        self._ref_memory = None if task.ref is None else torch.empty_like(self._memory)
        self._logits, self._ref_logits = self._memory, self._ref_memory

    def compute_logits(self, rows: slice) -> None:
        self._logits = self._logits_of(self._policy, rows, self._memory)
        if self._task.ref is not None:
            self._ref_logits = self._logits_of(self._task.ref, rows, self._ref_memory)

    def compute_logits_again(self, rows: slice, found: Tensor) -> None:
        """As `forward` left them; `found` is what it gave."""
        self.compute_logits(rows)
        if self._task.truncation:
            drop_below(self._logits, self._task.labels[rows], self._task.shard, found[-1])

    def _logits_of(self, model: tuple[Tensor, Tensor], rows: slice, memory: Tensor) -> Tensor:
        return self._task.shard.logits(model[0][rows], model[1], self._task.temperature, self._task.logit_cap, memory)

    def forward(self, rows: slice) -> Tensor:
        """Log-probs, entropy and log-normaliser [3, n], with a truncation the smallest logit that it keeps [4, n]; with a reference
        log-probs, entropy, KL and both log-normalisers [5, n]."""
        task = self._task
        self.compute_logits(rows)
        labels, logits, ref_logits = task.labels[rows], self._logits, self._ref_logits
        kept = ()
        if task.truncation:
            kept = (lowest_kept(logits, task.shard, task.truncation),)
            drop_below(logits, labels, task.shard, *kept)
        policy = Softmax.of(logits, labels, task.shard, other=ref_logits if task.reverse else None)
        if task.ref is None:
            return torch.stack((policy.logprobs, policy.entropy, policy.log_normaliser, *kept))
        ref = Softmax.of(ref_logits, labels, task.shard, other=None if task.reverse else logits)
        first, second = (policy, ref) if task.reverse else (ref, policy)
        # Normalisers are subtracted part by part: of nearly equal distributions the rounding error of a sum would exceed the divergence.
        kl = first.cross / first.total + (second.maximum - first.maximum) + (second.total / first.total).log()
        return torch.stack((policy.logprobs, policy.entropy, kl, policy.log_normaliser, ref.log_normaliser))

    def grad_logits(self, rows: slice, found: Tensor, upstream: Tensor) -> Tensor:
        """The gradient of the policy's logits before the temperature [n, v], in their place. `found` is what `forward` gave of these rows,
        `upstream` the gradients of the outputs that take one [1 to 3, n].

        For p = softmax z: that of log p at the label is 1 there minus p, that of the entropy H is -p (log p + H). Where a logit has become
        z = cap tanh(x / cap), that of x is 1 - (z / cap)^2 of that of z.
        """
        task, logits, normaliser = self._task, self._logits, found[self._task.num_outputs, :, None]
        scales: dict[int, Tensor] = dict(zip(task.taught, upstream[:, :, None] / task.temperature, strict=True))
        at_labels = scales[LOGPROBS][:, 0]
        if task.logit_cap is not None:
            at_labels = at_labels * self._slope(task.shard.pick(logits, task.labels[rows]))
        for columns in blocks(logits):
            slope = None if task.logit_cap is None else self._slope(logits[:, columns])
            log_p, factor = logits[:, columns].sub_(normaliser), -scales[LOGPROBS]  # of p, beside what the label gets
            if ENTROPY in scales:
                factor = torch.add(log_p, found[ENTROPY, :, None]).mul_(-scales[ENTROPY]).add_(factor)
            if KL in scales:
                self._grad_with_kl(log_p, columns, found, factor, scales[KL])
            else:
                log_p.exp_().mul_(factor)
            if slope is not None:
                log_p.mul_(slope)
        task.shard.add_at_labels(logits, task.labels[rows], at_labels)
        return logits

    def _slope(self, logits: Tensor) -> Tensor:
        """The derivative of capped logits, of which `logits` are the quotients by the temperature; 0 where a truncation dropped one."""
        return (logits * (self._task.temperature / self._task.logit_cap)).square_().neg_().add_(1).clamp_(min=0)

    def _grad_with_kl(self, log_p: Tensor, columns: slice, found: Tensor, factor: Tensor, scale: Tensor) -> None:
        """Overwrite log p with p factor, plus reverse scale p (log p - log q - KL), or forward scale (p - q)."""
        log_q = self._ref_logits[:, columns].sub_(found[4, :, None])
        if self._task.reverse:
            log_ratio = torch.sub(log_p, log_q, out=log_q)
            log_p.exp_().mul_(log_ratio.sub_(found[KL, :, None]).mul_(scale).add_(factor))
        else:
            log_p.exp_().mul_(scale + factor).sub_(log_q.exp_().mul_(scale))
