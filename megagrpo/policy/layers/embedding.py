"""The token embedding: its rows, their scale, and a gradient that goes straight to the float32 sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class ScaledEmbedding(LanguageModelEmbedding):
    """An embedding whose rows are multiplied by `scale`. The scale is first rounded to the rows' dtype."""

    scale = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the scaled rows [T, 1, H] of token ids [1, T]."""
        rows = super().forward(*args, **kwargs)
        return rows * float(torch.tensor(self.scale, dtype=rows.dtype))  # rounded on the host


class TokenEmbedding(VocabParallelEmbedding):
    """Megatron's embedding of the rows [V/tp, H] of this tensor-parallel rank, with a switch for its gradient.

    With `into_main_grad` the backward pass adds the gradients of the micro-batch's rows to the weight's float32
    `main_grad`, unrounded. The gradient [V/tp, H] of a micro-batch, almost all zeros, then never exists. An overlapped
    reduction excludes it: its hooks need a gradient that is passed on.
    """

    into_main_grad = False

    def forward(self, input_: Tensor) -> Tensor:
        """Return the rows of token ids [1, T]: [1, T, H], or [T/tp, 1, H] scattered over sequence-parallel ranks."""
        if not (self.into_main_grad and self.weight.requires_grad and torch.is_grad_enabled()):
            return super().forward(input_)
        ids = input_ - self.vocab_start_index
        missing = (ids < 0) | (ids >= self.weight.shape[0])
        rows = _Rows.apply(self.weight, ids.masked_fill_(missing, 0), missing[..., None])
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)


class _Rows(torch.autograd.Function):
    """Rows [1, T, H] of `ids` [1, T] in weight [V/tp, H], 0 where `missing` [1, T, 1]; gradients go to `main_grad`."""

    @staticmethod
    def forward(ctx: Any, weight: Any, ids: Tensor, missing: Tensor) -> Tensor:
        ctx.save_for_backward(ids, missing)
        ctx.main_grad = weight.main_grad  # the attribute is Megatron's
        return weight[ids].masked_fill_(missing, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ids, missing = ctx.saved_tensors
        ctx.main_grad.index_add_(0, ids.flatten(), grad.to(ctx.main_grad.dtype).masked_fill(missing, 0).flatten(0, 1))
        return None, None, None


def add_gradients_directly(chunks: Sequence[nn.Module]) -> None:
    """Make the embeddings of `chunks` add their gradients to `main_grad`, which DDP's wrapper has created."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TokenEmbedding):
                module.into_main_grad = True
