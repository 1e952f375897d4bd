"""The gradient of a loss with respect to the LM head's outputs, computed before the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from megagrpo.types import LossFn, LossInputs, MicroBatch


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
