"""The exact KL divergence between policy and reference over the whole vocabulary, from two vocabulary-sharded LM heads."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megagrpo.parallel.vocab_tiles import HeadGradients, RunningSoftmax, TileMemory, VocabShard, tile_logits

DIRECTIONS = ("forward", "reverse")


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
    vocab_size: int | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs [N], entropy [N], kl [N]): what `vocab_logprobs` gives of the policy, and the divergence of each token's distribution.

    With p = softmax(hidden weight^T / temperature) of the policy and q of the reference, in nats, over the whole vocabulary: reverse is
    KL(p || q) = sum p log(p / q), forward is KL(q || p) = sum q log(q / p). Nothing is sampled, so value and gradient are exact. The
    gradient flows through logprobs and kl to the policy's `hidden` and `weight` as in `vocab_logprobs`; the reference gets none.
    Arguments, padding rows and the duties of `group` are those of `vocab_logprobs`; two tiles [N, chunk] of logits exist at a time.
    Raises ValueError for another direction.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: {direction!r} is not one of {', '.join(DIRECTIONS)}")
    return _VocabKL.apply(hidden, weight, labels, ref_hidden, ref_weight, direction, group, temperature, vocab_size, chunk)


class _VocabKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden, weight, labels, ref_hidden, ref_weight, direction, group, temperature, vocab_size, chunk):
        shard = VocabShard.of(weight, group, vocab_size, chunk)
        memory, ref_memory, scratch, difference = (TileMemory(hidden, shard) for _ in range(4))
        policy, ref = RunningSoftmax(hidden), RunningSoftmax(hidden)
        weighting, other = (policy, ref) if direction == "reverse" else (ref, policy)
        picked = torch.zeros_like(policy.maximum)
        for tile in shard.tiles():
            logits = tile_logits(hidden, weight[tile], temperature, memory(tile))
            ref_logits = tile_logits(ref_hidden, ref_weight[tile], temperature, ref_memory(tile))
            picked += shard.pick(logits, labels, tile)
            mine, theirs = (logits, ref_logits) if direction == "reverse" else (ref_logits, logits)
            gap = torch.sub(mine, theirs, out=difference(tile))
            weighting.add(mine, scratch(tile), gap)
            other.add(theirs, scratch(tile))
        policy.combine(shard)
        ref.combine(shard)
        (picked,) = shard.sum(picked)
        # Normalisers are subtracted part by part: of nearly equal distributions the rounding error of a sum would exceed the divergence.
        kl = weighting.cross / weighting.total + (other.maximum - weighting.maximum) + (other.total / weighting.total).log()
        ctx.save_for_backward(hidden, weight, labels, ref_hidden, ref_weight, policy.log_normaliser, ref.log_normaliser, kl)
        ctx.shard, ctx.temperature, ctx.direction = shard, temperature, direction
        logprobs, entropy = policy.logprobs(picked), policy.entropy
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor, _grad_entropy: Tensor | None, grad_kl: Tensor):
        hidden, weight, labels, ref_hidden, ref_weight, log_normaliser, ref_log_normaliser, kl = ctx.saved_tensors
        shard, memory, ref_memory = ctx.shard, TileMemory(hidden, ctx.shard), TileMemory(hidden, ctx.shard)
        gradients = HeadGradients(hidden, weight, ctx.needs_input_grad[:2])
        scale, kl_scale = grad_logprobs / ctx.temperature, grad_kl / ctx.temperature
        for tile in shard.tiles():
            log_p = tile_logits(hidden, weight[tile], ctx.temperature, memory(tile)).sub_(log_normaliser[:, None])
            log_q = tile_logits(ref_hidden, ref_weight[tile], ctx.temperature, ref_memory(tile)).sub_(ref_log_normaliser[:, None])
            if ctx.direction == "reverse":
                # p * (kl_scale * (log p - log q - KL) - scale)
                log_ratio = torch.sub(log_p, log_q, out=log_q)
                grad_logits = log_p.exp_().mul_(log_ratio.sub_(kl[:, None]).mul_(kl_scale[:, None]).sub_(scale[:, None]))
            else:
                # kl_scale * (p - q) - scale * p
                grad_logits = log_p.exp_().mul_((kl_scale - scale)[:, None]).sub_(log_q.exp_().mul_(kl_scale[:, None]))
            shard.add_at_labels(grad_logits, labels, tile, scale)
            gradients.add(tile, grad_logits)
        return *gradients.result(), None, None, None, None, None, None, None, None
