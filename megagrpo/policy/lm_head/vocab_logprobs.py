"""Log-probs, entropy and exact KL from a vocabulary-sharded LM head. The [N, V/tp] logits never exist as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megagrpo.policy.lm_head import fused_logprobs
from megagrpo.policy.lm_head.divergence import tail
from megagrpo.policy.lm_head.fused_logprobs import FusedPass
from megagrpo.policy.lm_head.task import ENTROPY, KL, LOGPROBS, HeadTask
from megagrpo.policy.lm_head.vocab_shard import HeadGradients, Softmax, chunks, column_blocks, sum_dtype
from megagrpo.policy.lm_head.vocab_truncation import drop_below, lowest_kept
from megagrpo.train_types import OtherHead, RefHead, TopLogprobs
from megagrpo.types import NO_TRUNCATION


def vocab_logprobs(hidden: Tensor, weight: Tensor, task: HeadTask) -> tuple[Tensor, ...]:
    """Return (logprobs [N], entropy [N]) of `task.labels` under softmax(logits / temperature), in nats, float32
    (float64 for float64 inputs). `hidden` [N, H] and head `weight` [V/tp, H] share dtype float32, bfloat16 or float64.

    With `task.ref` a third result is kl [N], each token's exact KL to the reference over the whole vocabulary. With p
    of the policy and q of the reference, reverse is sum p log(p / q) and forward is sum q log(q / p). Nothing is
    sampled, so value and gradient are exact. The reference gets no gradient.

    Logits of only `task.chunk` tokens exist at a time. The gradient flows through logprobs and kl, and with
    `entropy_gradient` through entropy, to `hidden` and `weight`. The gradient of `hidden` is this rank's share: the
    caller sums it over the group (the backward of Megatron's copy_to_tensor_model_parallel_region).

    With `task.upstream` each chunk's logits become gradients while they exist, in three matrix products, as many as
    with all logits kept. Without it the backward pass recomputes the logits, a fourth product. It does so too when the
    actual gradients differ from upstream's, with the same result. That comparison makes a GPU's host wait. With
    `early_differs` the backward pass always takes upstream's gradients and sets `early_differs` where they are wrong.
    The caller reads it later and repeats the pass without upstream.

    With `upstream`, `into_main_grad` adds the gradient in the forward pass, which needs `early_differs`. An overlapped
    reduction excludes `into_main_grad`: its hooks need a gradient that is passed on.

    With `fused` Triton kernels compute the same from unrounded logits. They write logits to scratch of a bounded size
    or not at all (`megagrpo/policy/lm_head/fused_logprobs.py`). Raises ValueError when the kernels cannot run.
    """
    if task.fused:
        exact_kl, truncates = task.ref is not None, bool(task.truncation)
        if reason := fused_logprobs.refusal(hidden.dtype, hidden.shape[1], truncates, exact_kl, bool(task.fp8)):
            raise ValueError(f"fused log-probs: {reason}")
    assert task.fused or task.fp8 is None, "only the fused kernels multiply FP8"
    return _VocabHead.apply(hidden, weight, task if torch.is_grad_enabled() else replace(task, upstream=None))


def rows_with_others(hidden: Tensor, weight: Tensor, task: HeadTask, others: Sequence[OtherHead]) -> list[Tensor]:
    """Return log-probs, entropy, and the divergence from each of `others`, [N] each, as `vocab_logprobs` does.

    The first one shares the pass of the log-probs. Each further one computes the policy's logits once more.
    """
    tasks = [
        replace(task, truncation=NO_TRUNCATION, ref=other.head, direction=other.direction, mix=other.mix)
        for other in others
    ] or [task]
    more = [replace(one, upstream=None, entropy_gradient=False) for one in tasks[1:]]
    return [*vocab_logprobs(hidden, weight, tasks[0]), *(vocab_logprobs(hidden, weight, one)[KL] for one in more)]


def _begin(task: HeadTask, hidden: Tensor, weight: Tensor, gradients: bool) -> _Pass | FusedPass:
    """Return a pass over hidden [N, H] with head [V/tp, H]. With `gradients` it can compute the logits' gradients."""
    return (FusedPass if task.fused else _Pass)(hidden, weight, task, stores=gradients)


class _VocabHead(torch.autograd.Function):
    """(logprobs, entropy and, with a reference, kl), [N] each, of hidden [N, H] and weight [V/tp, H].

    With `upstream` the forward pass also computes the gradients of both. The backward pass returns them if the actual
    upstream gradients are equal to the early ones; otherwise it recomputes the logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, task: HeadTask) -> tuple[Tensor, ...]:
        passing, num_tokens = _begin(task, hidden, weight, task.upstream is not None), hidden.shape[0]
        results = hidden.new_empty(task.num_results, num_tokens, dtype=sum_dtype(hidden.dtype))
        early_gradients = hidden.new_empty(len(task.differentiable), num_tokens, dtype=sum_dtype(hidden.dtype))
        gradients = None
        if task.upstream is not None:
            # Where the caller repeats the pass after a wrong gradient, its sums are discarded: they may be changed
            # here.
            main_grad = None if task.early_differs is None else _main_grad(weight, task)
            gradients = HeadGradients(hidden, weight, passing.shard, ctx.needs_input_grad[:2], main_grad)
        for rows in chunks(num_tokens, passing.chunk):
            results[:, rows] = passing.forward(rows)
            if gradients is not None and task.upstream is not None:
                early_gradients[:, rows] = torch.stack(
                    task.upstream(rows, *(results[index, rows] for index in task.differentiable))
                )
                gradients.add(rows, passing.grad_logits(rows, results[:, rows], early_gradients[:, rows]))
        ctx.save_for_backward(hidden, weight, results, early_gradients)
        ctx.task, ctx.gradients = task, None if gradients is None else gradients.result()
        logprobs, entropy, *kl = (row.clone() for row in results[: task.num_outputs])
        if not task.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, *kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, results, early_gradients = ctx.saved_tensors
        upstream = torch.stack([grads[index] for index in ctx.task.differentiable])
        if ctx.gradients is not None and _taken(early_gradients, upstream, ctx.task.early_differs):
            return *ctx.gradients, None
        passing = _begin(ctx.task, hidden, weight, gradients=True)
        main_grad = _main_grad(weight, ctx.task)
        gradients = HeadGradients(hidden, weight, passing.shard, ctx.needs_input_grad[:2], main_grad)
        for rows in chunks(hidden.shape[0], passing.chunk):
            passing.compute_logits_again(rows, results[:, rows])
            gradients.add(rows, passing.grad_logits(rows, results[:, rows], upstream[:, rows]))
        return *gradients.result(), None


def _main_grad(weight: Tensor, task: HeadTask) -> Tensor | None:
    """Return the weight gradient's float32 sum [V/tp, H] to add to. None: autograd adds it in the weight's dtype."""
    return getattr(weight, "main_grad", None) if task.into_main_grad else None


def _taken(early: Tensor, actual: Tensor, differs: Tensor | None) -> bool:
    """Return whether the backward pass takes early gradients [1 to 3, N]: if exact or checked later by the caller."""
    if differs is None:
        return torch.equal(early, actual)
    differs |= ((early != actual) & ~(early.isnan() & actual.isnan())).any()
    return True


class _Pass:
    """One pass over the tokens, a chunk at a time: computes a chunk's logits, then its outputs or gradients."""

    def __init__(self, hidden: Tensor, weight: Tensor, task: HeadTask, stores: bool):
        self._task, self._policy, self.chunk = task, (hidden, weight), task.chunk
        self.shard = task.shard(weight)
        self._memory = self.shard.logits_buffer(hidden, task.chunk)
        self._top = task.ref if isinstance(task.ref, TopLogprobs) else None
        self._ref = task.ref if isinstance(task.ref, RefHead) else None
        self._ref_memory = self._memory[:0] if self._ref is None else torch.empty_like(self._memory)
        self._logits, self._ref_logits = self._memory, self._ref_memory
        capped = task.logit_cap is not None
        # [n, v] derivatives of the logits by the head's outputs, where the logits alone do not tell them
        scales = task.processors is not None and (capped or task.processors.has_slopes)
        self._slopes = torch.empty_like(self._memory) if scales and stores else None

    def compute_logits(self, rows: slice) -> None:
        """Compute the logits [n, v] of the tokens `rows`, of the reference too if there is one."""
        self._logits = self._logits_of(self._policy, rows, self._memory, self._task.logit_cap, self._slopes)
        if (ref := self._ref) is not None:
            cap = ref.logit_cap
            self._ref_logits = self._logits_of((ref.hidden, ref.weight), rows, self._ref_memory, cap)

    def compute_logits_again(self, rows: slice, results: Tensor) -> None:
        """Recompute logits [n, v] of `rows` as `forward` left them; `results` [3 to 5, n] is `forward`'s result."""
        self.compute_logits(rows)
        if self._task.truncation:
            drop_below(self._logits, self._task.labels[rows], self.shard, results[-1])

    def _logits_of(
        self,
        model: tuple[Tensor, Tensor],
        rows: slice,
        memory: Tensor,
        cap: float | None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        task, (hidden, weight) = self._task, model
        if task.processors is None:
            return self.shard.logits(hidden[rows], weight, task.temperature_of(rows), cap, memory)
        logits = self.shard.logits(hidden[rows], weight, 1.0, cap, memory)
        if slopes is not None:
            slopes = slopes[: len(logits)]
            slopes.fill_(1) if cap is None else slopes.copy_(_slope(logits, 1 / cap))
        task.processors.apply(logits, rows, self.shard, slopes)
        return logits.div_(task.temperature_of(rows))

    def forward(self, rows: slice) -> Tensor:
        """Return log-probs, entropy and log-normaliser [3, n]; with a truncation also the smallest kept logit [4, n].

        With a reference return log-probs, entropy, KL and both log-normalisers [5, n]; with a mixture also the sum of
        its slopes [6, n].
        """
        task = self._task
        self.compute_logits(rows)
        labels, logits, ref_logits = task.labels[rows], self._logits, self._ref_logits
        lowest: tuple[Tensor, ...] = ()
        if task.truncation:
            lowest = (lowest_kept(logits, self.shard, task.truncation_of(rows)),)
            drop_below(logits, labels, self.shard, *lowest)
        policy = Softmax.of(logits, labels, self.shard, other=ref_logits if task.reverse else None)
        if task.ref is None:
            return torch.stack((policy.logprobs, policy.entropy, policy.log_normaliser, *lowest))
        if self._top is not None:
            return self._with_top(policy, rows, self._top)
        ref = Softmax.of(ref_logits, labels, self.shard, other=None if task.reverse else logits)
        if task.divergence.mixes:
            return self._with_mixture(policy, ref)
        first, second = (policy, ref) if task.reverse else (ref, policy)
        # Normalisers are subtracted part by part: for nearly equal distributions the rounding error of a sum would
        # exceed the KL.
        kl = first.difference / first.total + (second.maximum - first.maximum) + (second.total / first.total).log()
        return torch.stack((policy.logprobs, policy.entropy, kl, policy.log_normaliser, ref.log_normaliser))

    def _with_top(self, policy: Softmax, rows: slice, top: TopLogprobs) -> Tensor:
        """Return log-probs, entropy, divergence, log-normaliser, the sum of the slopes, and the slope of the other
        tokens divided by their probability [6, n]."""
        at_top = self.shard.gather_columns(self._logits, top.token_ids[rows])
        self.shard.all_reduce(at_top, dist.ReduceOp.SUM)
        log_p = tail(at_top - policy.log_normaliser[:, None])
        values, slopes = self._task.divergence.terms(log_p, tail(top.logprobs[rows].to(log_p.dtype)))
        of_tail = slopes[:, -1] / log_p[:, -1].exp()
        sums = values.sum(dim=-1), policy.log_normaliser, slopes.sum(dim=-1), of_tail
        return torch.stack((policy.logprobs, policy.entropy, *sums))

    def _at_top(self, rows: slice, results: Tensor, scale: Tensor, temperature: float | Tensor) -> Tensor:
        """Return [n, k]: what the gradient at the most likely tokens that this rank holds has beyond the other
        tokens."""
        assert self._top is not None, "the task has no most likely tokens"
        ids, logits = self._top.token_ids[rows], self._logits
        log_p = self.shard.gather_columns(logits, ids) - results[3, :, None]
        slopes = self._task.divergence.terms(log_p, self._top.logprobs[rows].to(log_p.dtype))[1]
        beyond = scale * (slopes - log_p.exp() * results[5, :, None])
        slope = self._slope_at(logits, slice(None), temperature, ids)
        return beyond if slope is None else beyond * slope

    def _with_mixture(self, policy: Softmax, ref: Softmax) -> Tensor:
        """Return log-probs, entropy, divergence, both log-normalisers and the sum of the slopes [6, n]."""
        normalisers = policy.log_normaliser, ref.log_normaliser
        sums = self._logits.new_zeros(2, self._logits.shape[0])
        for columns in column_blocks(self._logits):
            log_p, log_q = (
                logits[:, columns] - normaliser[:, None]
                for logits, normaliser in zip((self._logits, self._ref_logits), normalisers, strict=True)
            )
            sums += torch.stack([part.sum(dim=-1) for part in self._task.divergence.terms(log_p, log_q)])
        self.shard.all_reduce(sums, dist.ReduceOp.SUM)
        return torch.stack((policy.logprobs, policy.entropy, sums[0], *normalisers, sums[1]))

    def grad_logits(self, rows: slice, results: Tensor, upstream: Tensor) -> Tensor:
        """Return the gradient of the policy's logits before the temperature [n, v], written over the logits.

        `results` is `forward`'s result for the rows; `upstream` [1 to 3, n] holds gradients of outputs that take one.

        For p = softmax z, d log p(label) / d z is 1 at the label, minus p; d H / d z of the entropy H is -p (log p +
        H). For a capped logit z = cap tanh(x / cap), d z / d x is 1 - (z / cap)^2.
        """
        task, logits, normaliser = self._task, self._logits, results[self._task.num_outputs, :, None]
        temperature = task.temperature_of(rows)
        scales: dict[int, Tensor] = dict(zip(task.differentiable, upstream[:, :, None] / temperature, strict=True))
        slope = self._slope_at(logits, slice(None), temperature, task.labels[rows, None])
        at_labels = scales[LOGPROBS] if slope is None else scales[LOGPROBS] * slope
        at_top = None if self._top is None else self._at_top(rows, results, scales[KL], temperature)
        for columns in column_blocks(logits):
            slope = self._slope_at(logits, columns, temperature)
            # the factor of p; the label's term is added at the end
            log_p, factor = logits[:, columns].sub_(normaliser), -scales[LOGPROBS]
            if ENTROPY in scales:
                factor = torch.add(log_p, results[ENTROPY, :, None]).mul_(-scales[ENTROPY]).add_(factor)
            if KL in scales:
                self._grad_with_kl(log_p, columns, results, factor, scales[KL])
            else:
                log_p.exp_().mul_(factor)
            if slope is not None:
                log_p.mul_(slope)
        self.shard.add_at_labels(logits, task.labels[rows], at_labels[:, 0])
        if self._top is not None and at_top is not None:
            self.shard.add_at_columns(logits, self._top.token_ids[rows], at_top)
        return logits

    def _slope_at(
        self, logits: Tensor, columns: slice, temperature: float | Tensor, ids: Tensor | None = None
    ) -> Tensor | None:
        """Return d logit / d output of the head at `columns` [n, w], or at `ids` [n, k]; None where it is 1."""
        cap, source = self._task.logit_cap, logits if self._slopes is None else self._slopes[: len(logits)]
        if self._slopes is None and cap is None:
            return None
        part = source[:, columns] if ids is None else self.shard.gather_columns(source, ids)
        return part if self._slopes is not None or cap is None else _slope(part, temperature / cap)

    def _grad_with_kl(self, log_p: Tensor, columns: slice, results: Tensor, factor: Tensor, scale: Tensor) -> None:
        """Overwrite log p with p factor, plus scale p (log p - log q - KL) if reverse, scale (p - q) if forward, or
        scale (s - p sum s) for a mixture with slopes s, and for tokens that are not among the most likely ones."""
        if self._top is not None:
            log_p.exp_().mul_(factor + scale * (results[5, :, None] - results[4, :, None]))
            return
        log_q = self._ref_logits[:, columns].sub_(results[4, :, None])
        if self._task.divergence.mixes:
            slopes = self._task.divergence.terms(log_p, log_q)[1]
            log_p.exp_().mul_(factor - scale * results[5, :, None]).add_(slopes.mul_(scale))
        elif self._task.reverse:
            log_ratio = torch.sub(log_p, log_q, out=log_q)
            log_p.exp_().mul_(log_ratio.sub_(results[KL, :, None]).mul_(scale).add_(factor))
        else:
            log_p.exp_().mul_(scale + factor).sub_(log_q.exp_().mul_(scale))


def _slope(logits: Tensor, per_logit: float | Tensor) -> Tensor:
    """Return the derivative of capped logits [n, v], 0 for truncated ones. `per_logit` is the temperature divided by
    the cap."""
    return (logits * per_logit).square_().neg_().add_(1).clamp_(min=0)
