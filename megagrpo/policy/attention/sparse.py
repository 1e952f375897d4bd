"""DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv 2512.02556) in plain torch, for packs, shared prompts and
context-parallel ranks.

A frozen indexer scores the keys of each token, and attention sees those with the highest scores. megatron-core's own
module trains the indexer and restarts positions at 0 for each packed sequence. Every tensor-parallel rank computes all
scores: its heads of the attention need the choice for all tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megagrpo.families.shared.architecture import Indexer as Shape
from megagrpo.policy.attention.causal import BLOCK_QUERIES, Scores, causal_bias, masked_attention
from megagrpo.policy.attention.context_parallel import context_batches
from megagrpo.policy.attention.latent_attention import WholeLinear
from megagrpo.policy.attention.packed import Rotary, TorchAttention, batches_of

NORM_EPS = 1e-6  # of the indexer's keys, as in transformers


class Index(NamedTuple):
    """What scores of keys follow from: queries [..., heads, d], keys [..., d], and weights [..., heads] float32."""

    queries: Tensor
    keys: Tensor
    weights: Tensor


class Indexer(nn.Module):
    """Computes the `Index` of a pack from the inputs of attention.

    Every tensor-parallel rank has all weights, none of them trained. `build._set_rotary` sets `rotary`.
    """

    rotary: Rotary | None = None

    def __init__(self, config: MLATransformerConfig, shape: Shape, tp_group: Any):
        super().__init__()
        assert config.q_lora_rank is not None, "the indexer reads the latent of the queries"
        self.shape, self.sequence_parallel, self.tp_group = shape, config.sequence_parallel, tp_group
        self.linear_wq_b = WholeLinear(config, config.q_lora_rank, shape.heads * shape.head_dim)
        self.linear_wk = WholeLinear(config, config.hidden_size, shape.head_dim)
        # float32 as in the reference code, whatever the model's dtype
        self.k_norm = nn.LayerNorm(shape.head_dim, eps=NORM_EPS, device=torch.cuda.current_device())
        self.linear_weights_proj = WholeLinear(config, config.hidden_size, shape.heads)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, latent: Tensor, packed: PackedSeqParams) -> Index:
        """Return the index of this context-parallel rank's tokens, in the dtype of the hidden states but for weights.

        `hidden` [T, 1, H] are the attention's inputs, `latent` [T, R] the normed latents of its queries; under sequence
        parallelism this rank's part of the tokens.
        """
        assert self.rotary is not None, "build._set_rotary has not run"
        hidden, latent = hidden.flatten(0, 1), latent.flatten(0, -2)
        heads, width = self.shape.heads, self.shape.head_dim
        keys = self.k_norm(self.linear_wk(hidden).float()).to(hidden.dtype)
        vectors = torch.cat((self.linear_wq_b(latent), keys), dim=-1)
        weights = F.linear(hidden.float(), self.linear_weights_proj.weight.float())
        if self.sequence_parallel:
            vectors, weights = (
                gather_from_sequence_parallel_region(part, group=self.tp_group) for part in (vectors, weights)
            )
        queries, keys = vectors.split([heads * width, width], dim=-1)
        queries, keys = self.rotary.rotate_pack(queries.unflatten(-1, (heads, width)), keys[:, None], packed)
        return Index(queries, keys[:, 0], weights)


class SparseAttention(TorchAttention):
    """Core attention of `LatentAttention` over the keys that an `Indexer` chooses.

    Where no sequence has more tokens than a token sees, it is `TorchAttention`.
    """

    requires_dsa_inputs = True  # Megatron then passes `x` and `qr`, through its recomputation too

    def __init__(self, config: MLATransformerConfig, *args: Any, indexer: Shape, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.indexer = Indexer(config, indexer, self.tp_group)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        x: Tensor,
        qr: Tensor,
        **__: Any,
    ) -> Tensor:
        """Return the attention [T, h * v] of query [T, h, d], key [T, h, d] and value [T, h, v]; `x` and `qr` are the
        inputs of `Indexer`. T is T/cp when a context-parallel group shares the pack."""
        packed, chosen = packed_seq_params, self.indexer.shape.keys
        assert packed is not None, "sparse attention runs on packs only"
        if packed.max_seqlen_q <= chosen:
            return super().forward(query, key, value, packed_seq_params=packed)
        index, width = self.indexer(x, qr, packed), key.shape[-1]
        seen, scored = torch.cat((key, value), dim=-1), index.keys
        if self.cp_group is not None:
            seen, scored = (gather_from_sequence_parallel_region(part, group=self.cp_group) for part in (seen, scored))
        batches, pack_order = self._batches(packed, query.dtype)
        outputs = []
        for of_queries, of_keys, mask in batches:
            k, v = _rows(seen, of_keys).split([width, value.shape[-1]], dim=-1)
            index_keys = _rows(scored, of_keys)
            of_batch = [_rows(part, of_queries) for part in (query, index.queries, index.weights)]
            blocks = zip(*(part.split(BLOCK_QUERIES, dim=1) for part in (*of_batch, mask)), strict=True)
            done = []
            for q, queries, weights, block in blocks:
                # The choice is computed again in the backward pass: it has as many elements as scores.
                inputs = q, k, v, Index(queries, index_keys, weights), block, chosen, self.scale
                done.append(checkpoint(sparse_attention, *inputs, use_reentrant=False, preserve_rng_state=False))
            outputs.append(torch.cat(done, dim=1).flatten(0, 1))
        return torch.cat(outputs).index_select(0, pack_order)

    def _batches(
        self, packed: PackedSeqParams, dtype: torch.dtype
    ) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
        """Return (positions of queries [S, Lq], those of keys [S, Lk], mask [S or 1, Lq, Lk]) of each batch, and
        `pack_order`."""
        if self.cp_group is not None:
            of_rank, pack_order = context_batches(packed, self.cp_group, None, dtype)
            return [(batch.queries, batch.keys, mask) for batch, mask in of_rank], pack_order
        own = batches_of(packed)
        return [(rows, rows, _causal(rows, dtype)) for rows in own.rows], own.pack_order


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Return tensor[index] [*index.shape, ...]."""
    return tensor.index_select(0, index.flatten()).view(*index.shape, *tensor.shape[1:])


def _causal(index: Tensor, dtype: torch.dtype) -> Tensor:
    length = index.shape[1]
    return causal_bias(torch.arange(length, device=index.device), length, None, dtype)[None]


def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, index: Index, mask: Tensor, chosen: int, scale: float
) -> Tensor:
    """Return [S, Lq, h * v]: attention of query [S, Lq, h, d] over the `chosen` keys [S, Lk, h, d] with the highest
    scores among those that `mask` [S or 1, Lq, Lk] does not hide."""
    scores = key_scores(index)
    picked = (scores + mask.float()).topk(min(chosen, scores.shape[-1]), dim=-1).indices
    hidden = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, picked, False)
    return masked_attention(query, key, value, mask.masked_fill(hidden, float("-inf")), Scores(scale))


@torch.no_grad()
def key_scores(index: Index) -> Tensor:
    """Return the sum over heads of weight x relu(q k / sqrt(d)) / sqrt(heads), float32 [S, Lq, Lk]."""
    heads, width = index.queries.shape[-2:]
    keys = index.keys.float().transpose(1, 2)
    total = torch.zeros((), device=keys.device)
    for head in range(heads):
        products = (index.queries[:, :, head].float() @ keys) * width**-0.5
        total = total + products.relu_() * (index.weights[:, :, head, None] * heads**-0.5)
    return total
