"""Log-probabilities and entropy from a vocabulary-sharded LM head, without the full vocabulary ever being in one place.

A tensor-parallel rank holds the head's rows [V/tp, H]. Logits exist for `chunk` tokens at a time, in float32, and only this rank's share of
the vocabulary; what crosses ranks is one maximum and three sums per token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

PADDING_LOGIT = -1e30  # its probability is exactly 0; minus infinity would make 0 * inf in the entropy


def vocab_logprobs(
    hidden: Tensor,  # [N, H] float32 or bfloat16
    weight: Tensor,  # [V/tp, H]
    labels: Tensor,  # [N] int64, ids in the full vocabulary
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """(logprobs [N], entropy [N]) in float32 of softmax(hidden weight^T / temperature).

    `group` are the tensor-parallel ranks (None: one rank holds all rows). Rows at or above `vocab_size` are padding and get probability 0.
    The gradient flows through logprobs to `hidden` and `weight`; entropy carries none. The gradient of `hidden` is this rank's share: the
    caller sums it over the group (the backward of Megatron's copy_to_tensor_model_parallel_region). When all N tokens fit one chunk their
    probabilities are kept for the backward pass; otherwise each chunk's logits are computed again.
    """
    return _VocabLogprobs.apply(hidden, weight, labels, group, temperature, vocab_size, chunk)


class _VocabLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden, weight, labels, group, temperature, vocab_size, chunk):
        first_row = dist.get_rank(group) * weight.shape[0] if group is not None else 0
        own_rows = weight.shape[0] if vocab_size is None else max(0, min(weight.shape[0], vocab_size - first_row))
        num_tokens = hidden.shape[0]
        logprobs, entropy, log_normaliser = (hidden.new_empty(num_tokens, dtype=torch.float32) for _ in range(3))
        keep = 0 < num_tokens <= chunk and (hidden.requires_grad or weight.requires_grad)
        probabilities = None
        for start in range(0, num_tokens, chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], weight, temperature, own_rows)
            maximum = logits.amax(dim=-1)
            _reduce(maximum, group, dist.ReduceOp.MAX)
            local, held = _local_labels(labels[rows], first_row, own_rows)
            picked = torch.where(held, logits.gather(1, local[:, None])[:, 0] - maximum, 0.0)
            shifted = logits.sub_(maximum[:, None])
            exponentials = shifted.exp()
            sums = torch.stack((exponentials.sum(dim=-1), torch.linalg.vecdot(exponentials, shifted), picked))
            _reduce(sums, group, dist.ReduceOp.SUM)
            log_sum = sums[0].log()
            logprobs[rows] = sums[2] - log_sum
            entropy[rows] = log_sum - sums[1] / sums[0]
            log_normaliser[rows] = maximum + log_sum
            if keep:
                probabilities = exponentials.div_(sums[0][:, None]).to(hidden.dtype)
        ctx.save_for_backward(hidden, weight, labels, log_normaliser, probabilities)
        ctx.settings = (temperature, chunk, first_row, own_rows)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor, _grad_entropy: Tensor | None):
        hidden, weight, labels, log_normaliser, kept = ctx.saved_tensors
        temperature, chunk, first_row, own_rows = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        # Chunks are summed in float32: in bfloat16 the later ones would be lost to rounding.
        grad_weight = None if kept is not None else torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            if kept is not None:
                probabilities = kept
            else:
                logits = _logits(hidden[rows], weight, temperature, own_rows)
                probabilities = logits.sub_(log_normaliser[rows, None]).exp_()
            scale = (grad_logprobs[rows] / temperature).to(probabilities.dtype)
            grad_logits = probabilities.mul_(-scale[:, None])  # in place: autograd refuses a second backward pass
            local, held = _local_labels(labels[rows], first_row, own_rows)
            grad_logits.scatter_add_(1, local[:, None], torch.where(held, scale, 0.0)[:, None])
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is None:
                return grad_hidden, grad_logits.t() @ hidden, None, None, None, None, None
            grad_weight += grad_logits.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float, own_rows: int) -> Tensor:
    """[n, V/tp] float32."""
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits.div_(temperature)
    if own_rows < weight.shape[0]:
        logits[:, own_rows:] = PADDING_LOGIT
    return logits


def _local_labels(labels: Tensor, first_row: int, own_rows: int) -> tuple[Tensor, Tensor]:
    """(row of this rank's shard, whether this rank holds it); a row not held points at 0."""
    local = labels - first_row
    held = (local >= 0) & (local < own_rows)
    return torch.where(held, local, 0), held


def _reduce(values: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=op, group=group)
