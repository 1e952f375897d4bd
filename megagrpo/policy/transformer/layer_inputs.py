"""Inputs per layer (Gemma 3n, Gemma 4 E2B and E4B): each token has a vector for each decoder block, from a second
embedding and from a projection of its first one. A block adds it to its output through a gate and a projection."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megagrpo.policy.layers.bypass_gradient import detour, leaf_of
from megagrpo.policy.layers.embedding import ScaledEmbedding, TokenEmbedding
from megagrpo.policy.layers.norm_modules import RMSNorm
from megagrpo.policy.transformer.specs import LAYERS_PER_BLOCK


class WholeWeight(nn.Module):
    """A linear without bias whose weight [out, in] every tensor-parallel rank has."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int):
        super().__init__()
        empty = torch.empty(outputs, inputs, dtype=config.params_dtype, device=torch.cuda.current_device())
        weight: Any = nn.Parameter(empty)
        weight.sequence_parallel = config.sequence_parallel  # each rank sees a part of the tokens
        self.weight = weight
        if config.perform_initialization:
            config.init_method(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the products [..., out] of x [..., in]."""
        return F.linear(x, self.weight)


class LayerInputs(MegatronModule):
    """The vectors of all `blocks` blocks, of `width` elements each."""

    current: Tensor  # [T, 1, blocks, width] of the forward pass in progress

    def __init__(self, embedding: Any, blocks: int, width: int):
        config, words = embedding.config, embedding.word_embeddings
        super().__init__(config)
        self.shape, self.scale = (blocks, width), width**0.5
        self.words = VocabParallelEmbedding(
            words.num_embeddings,
            blocks * width,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=words.reduce_scatter_embeddings,
            config=config,
            tp_group=words.tp_group,
        )
        self.words.__class__ = TokenEmbedding
        weight: Any = self.words.weight
        weight.is_embedding_or_output_parameter = True  # Muon leaves it to AdamW
        self.projection = WholeWeight(config, config.hidden_size, blocks * width)
        self.norm = RMSNorm(config, width, config.layernorm_epsilon)

    def forward(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Return the vectors [T, 1, blocks, width] of token ids [1, T] with the embeddings `rows` [T, 1, H]."""
        own = self.words(token_ids)
        own = own if self.words.reduce_scatter_embeddings else own.transpose(0, 1)
        projected = (self.projection(rows) * self.config.hidden_size**-0.5).unflatten(-1, self.shape)
        own = own.unflatten(-1, self.shape) * float(torch.tensor(self.scale, dtype=own.dtype))
        return (self.norm(projected) + own) * 0.5**0.5


class LayeredEmbedding(ScaledEmbedding):
    """An embedding that also computes the inputs per layer."""

    layer_inputs: LayerInputs

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the scaled rows [T, 1, H] of token ids [1, T]."""
        rows: Tensor = super().forward(input_ids, *args, **kwargs)
        vectors = self.layer_inputs(input_ids, rows)
        self.layer_inputs.current = leaf_of(vectors) if vectors.requires_grad else vectors
        return detour(rows, vectors, self.layer_inputs.current) if vectors.requires_grad else rows


class LayerInput(nn.Module):
    """Adds a block's vectors to its output."""

    def __init__(self, config: TransformerConfig, width: int):
        super().__init__()
        self.gate = WholeWeight(config, config.hidden_size, width)
        self.projection = WholeWeight(config, width, config.hidden_size)
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden: Tensor, vectors: Tensor) -> Tensor:
        """Return the hidden states [T, 1, H] with `vectors` [T, 1, width]."""
        gated = F.gelu(self.gate(hidden), approximate="tanh") * vectors
        return hidden + self.norm(self.projection(gated))


def add_layer_inputs(model: HybridModel, width: int, blocks: int) -> None:
    """Give a model of one pipeline stage vectors of `width` elements for each of its blocks."""
    embedding = model.embedding
    embedding.__class__ = LayeredEmbedding
    embedding.layer_inputs = LayerInputs(embedding, blocks, width)
    inputs = embedding.layer_inputs

    def added(layer: Any, _: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        block = layer.layer_number // LAYERS_PER_BLOCK - 1
        return layer.layer_input(outputs[0], inputs.current[:, :, block]), outputs[1]

    for layer in model.decoder.layers:
        if layer.layer_number % LAYERS_PER_BLOCK == 0:
            layer.layer_input = LayerInput(model.config, width)
            layer.register_forward_hook(added)
