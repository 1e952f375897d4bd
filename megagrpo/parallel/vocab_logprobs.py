"""Log-probabilities and entropy from a vocabulary-sharded LM head, the [N, V/tp] logits never being in one place."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megagrpo.parallel.vocab_tiles import HeadGradients, RunningSoftmax, TileMemory, VocabShard, tile_logits


def vocab_logprobs(
    hidden: Tensor,  # [N, H] float32, bfloat16 or float64
    weight: Tensor,  # [V/tp, H], the same dtype
    labels: Tensor,  # [N] int64, ids in the full vocabulary
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """(logprobs [N], entropy [N]) in nats, float32 (float64 for float64 inputs), of softmax(hidden weight^T / temperature).

    `group` are the tensor-parallel ranks (None: one rank holds all rows); all of them must call this with the same N. Rows at or above
    `vocab_size` are padding and get probability 0. Logits exist for `chunk` rows of the head at a time and are computed once more in the
    backward pass. The gradient flows through logprobs to `hidden` and `weight`; entropy carries none. The gradient of `hidden` is this
    rank's share: the caller sums it over the group (the backward of Megatron's copy_to_tensor_model_parallel_region).
    """
    return _VocabLogprobs.apply(hidden, weight, labels, group, temperature, vocab_size, chunk)


class _VocabLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden, weight, labels, group, temperature, vocab_size, chunk):
        shard = VocabShard.of(weight, group, vocab_size, chunk)
        memory, scratch, softmax = TileMemory(hidden, shard), TileMemory(hidden, shard), RunningSoftmax(hidden)
        picked = torch.zeros_like(softmax.maximum)
        for tile in shard.tiles():
            logits = tile_logits(hidden, weight[tile], temperature, memory(tile))
            picked += shard.pick(logits, labels, tile)
            softmax.add(logits, scratch(tile))
        softmax.combine(shard)
        (picked,) = shard.sum(picked)
        ctx.save_for_backward(hidden, weight, labels, softmax.log_normaliser)
        ctx.shard, ctx.temperature = shard, temperature
        logprobs, entropy = softmax.logprobs(picked), softmax.entropy
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor, _grad_entropy: Tensor | None):
        hidden, weight, labels, log_normaliser = ctx.saved_tensors
        shard, memory = ctx.shard, TileMemory(hidden, ctx.shard)
        gradients = HeadGradients(hidden, weight, ctx.needs_input_grad[:2])
        scale = grad_logprobs / ctx.temperature
        for tile in shard.tiles():
            logits = tile_logits(hidden, weight[tile], ctx.temperature, memory(tile))
            # scale * (onehot(label) - p)
            grad_logits = logits.sub_(log_normaliser[:, None]).exp_().mul_(-scale[:, None])
            shard.add_at_labels(grad_logits, labels, tile, scale)
            gradients.add(tile, grad_logits)
        return *gradients.result(), None, None, None, None, None
