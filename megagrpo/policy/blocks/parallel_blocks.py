"""Blocks whose attention and MLP both read the output of one norm, LayerNorm without a bias (Command R)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight over the last dimension."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        start = torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(start)
        # finalize_model_grads sums this gradient over the tensor-parallel ranks, each of which sees a part of the
        # sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed x [..., H] in x's dtype."""
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)


class FirstNorm(LayerNorm):
    """The norm of a block. It keeps its output until the block's MLP takes it."""

    output: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed x [..., H] in x's dtype."""
        self.output = super().forward(x)
        return self.output


class SameNorm(nn.Module):
    """In place of a norm before the MLP: the output of the block's `FirstNorm`."""

    first: tuple[FirstNorm, ...] = ()  # a tuple, so that its weight is no parameter of this module

    def __init__(self, **_: Any):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's normed input [..., H]; x, the sum of that input and of the attention, is not read."""
        (first,) = self.first
        output, first.output = first.output, None
        assert output is not None, "the attention of this block has not run"
        return output


def join_norms(model: HybridModel) -> None:
    """Give each MLP's `SameNorm` the norm of the layer before it, the attention of the same block."""
    first = None
    for layer in model.decoder.layers:
        if isinstance(layer.input_layernorm, FirstNorm):
            first = layer.input_layernorm
        elif isinstance(layer.pre_mlp_layernorm, SameNorm):
            assert first is not None, "a stage begins with an MLP"
            layer.pre_mlp_layernorm.first = (first,)
