"""Core attention in plain torch for packed sequences, rotary positions included. Used where there is no Transformer Engine.

A typical micro-batch on a CPU is 60 sequences of 50 tokens. One attention call per sequence would cost more than the arithmetic, so
sequences of similar length are gathered into right-padded batches: [T, heads, d] -> [S, L, heads, d]. Right padding needs no mask
beside the causal one: a real token never sees what comes after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megagrpo.policy.attention.causal import causal_attention
from megagrpo.policy.attention.context_parallel import context_attention
from megagrpo.policy.elementwise import rotate

# A batch takes sequences down to this share of its longest, so at most 30 % of its rows are padding.
MIN_FILL = 0.7


def pack_params(cu_seqlens: Tensor, prefixes: Tensor | None = None, own: Tensor | None = None) -> PackedSeqParams:
    """Megatron's description of a pack with borders `cu_seqlens` [S + 1] int32, for a model forward of batch size 1.

    `prefixes` [S] int64 names, for each sequence, the one it continues, or -1: it sees that one's tokens before its own, and its
    positions go on from there. A prefix has no prefix of its own. Only `TorchAttention` knows prefixes. `own` [T/cp] int64 are the
    places in the pack of the tokens that a context-parallel rank holds, when it does not hold them all.
    """
    lengths = cu_seqlens.diff()
    before = prefix_lengths(lengths, prefixes)
    longest = int((lengths + before).max())
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    if own is not None:  # Transformer Engine wants these as well; padding is a part of the sequence that it ends, no token sees it
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = cu_seqlens
    packed.prefixes, packed.positions_before, packed.own = prefixes, before, own
    return packed


def prefix_lengths(lengths: Tensor, prefixes: Tensor | None) -> Tensor:
    """[S]: how many tokens each sequence sees before its own, from the sequences' own lengths [S]."""
    if prefixes is None:
        return torch.zeros_like(lengths)
    return torch.where(prefixes < 0, 0, lengths[prefixes.clamp(min=0)])


@dataclass(frozen=True)
class Batches:
    """Where each token of a pack goes. `rows[i]` [S_i, L_i] are the pack positions of batch i, a prefix before the tokens that continue
    it, padding repeating position 0; `back` [T] is the place of each token among the rows of all batches end to end."""

    rows: tuple[Tensor, ...]
    back: Tensor


def batch_sequences(borders: list[int], device: torch.device, prefixes: list[int] | None = None) -> Batches:
    """Group the sequences between `borders` (cu_seqlens) by the length of what they see: their prefix, if any, and themselves."""
    own = list(pairwise(borders))
    before = [(0, 0) if prefixes is None or prefixes[i] < 0 else own[prefixes[i]] for i in range(len(own))]
    # (tokens seen, where its prefix begins, length of the prefix, where it begins itself)
    spans = sorted(((q - p + b - a, p, q - p, a) for (a, b), (p, q) in zip(own, before, strict=True) if b > a), reverse=True)
    groups: list[list[tuple[int, int, int, int]]] = []
    for span in spans:
        if not groups or span[0] < MIN_FILL * groups[-1][0][0]:
            groups.append([])
        groups[-1].append(span)
    rows, back, offset = [], torch.empty(borders[-1], dtype=torch.int64), 0
    for group in groups:
        seen, prefix_starts, prefix_sizes, starts = (torch.tensor(column)[:, None] for column in zip(*group, strict=True))
        place = torch.arange(group[0][0])
        index = torch.where(place < prefix_sizes, prefix_starts + place, starts + place - prefix_sizes)
        index = torch.where(place < seen, index, 0)
        itself = (place >= prefix_sizes) & (place < seen)
        back[index[itself]] = offset + torch.arange(index.numel()).view_as(index)[itself]
        rows.append(index.to(device))
        offset += index.numel()
    return Batches(tuple(rows), back.to(device))


def _batches_of(packed: PackedSeqParams) -> Batches:
    """The batches of a pack, computed by the first layer that asks and kept on the pack for the others."""
    if not hasattr(packed, "batches"):
        prefixes = None if packed.prefixes is None else packed.prefixes.tolist()
        packed.batches = batch_sequences(packed.cu_seqlens_q.tolist(), packed.cu_seqlens_q.device, prefixes)
    return packed.batches


class Rotary:
    """Rotary positions: `frequencies` [n] in radians per position turn the first 2n of a head's dimensions, which may be fewer than all;
    cos and sin are multiplied by `factor` (yarn's attention factor). `interleaved` as in `elementwise.rotate`."""

    def __init__(self, frequencies: Tensor, factor: float = 1.0, interleaved: bool = False):
        self.frequencies, self.factor, self.interleaved = frequencies, factor, interleaved

    def turn(self, query: Tensor, key: Tensor, packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
        """Query and key [T, heads, d], or [T/cp, heads, d], rotated by each token's place in its sample."""
        return self.turned(query, key, *self.of_pack(packed, query.dtype))

    def turned(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key [..., heads, d] rotated by angles whose cos and sin [..., 1, n] are given."""
        return rotate(query, cos, sin, self.interleaved), rotate(key, cos, sin, self.interleaved)

    def of_pack(self, packed: PackedSeqParams, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, n], or [T/cp, 1, n], of each token's place in its sample, computed by the first layer that asks."""
        rotations = vars(packed).setdefault("rotations", {})
        if self not in rotations:
            borders = packed.cu_seqlens_q
            first = packed.positions_before - borders[:-1]
            positions = torch.arange(int(borders[-1]), device=borders.device) + first.repeat_interleave(borders.diff())
            own = positions if packed.own is None else positions[packed.own]
            rotations[self] = self.at(own[:, None], dtype)
        return rotations[self]

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [*positions.shape, n], computed in float32."""
        angles = positions[..., None] * self.frequencies
        return tuple((self.factor * side).to(dtype) for side in (angles.cos(), angles.sin()))


class TorchAttention(MegatronModule):
    """Causal self-attention as a megatron-core `core_attention` module: packed (thd) or plain (sbhd), no dropout.

    It rotates queries and keys by `rotary`, which whoever builds the model sets, as `softcap`; Megatron's own rotation, much slower on
    packs, is off. The window is that of Megatron's configuration. `softmax_offset` are the sinks of this rank's heads, None without; name
    and checkpoint key are those of Megatron's own attention.
    """

    rotary: Rotary | None = None
    softcap: float | None = None

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
        **sizes: int,
    ):
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and config.softmax_type in ("vanilla", "learnable")
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout), "no tensor-parallel dropout generator"
        self.scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(config.kv_channels)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None  # Megatron's does not count the token itself
        self.cp_group = pg_collection.cp if pg_collection is not None and pg_collection.cp.size() > 1 else None
        self.tp_group = pg_collection.tp if pg_collection is not None else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device()))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The sinks, cut over tensor-parallel ranks."""
        own = self.state_dict(prefix="", keep_vars=True)
        groups = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        return make_sharded_tensors_for_checkpoint(own, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Packed: query [T, h, d], key [T, g, d], value [T, g, v] -> [T, h * v]. Plain: [L, S, h, d] -> [L, S, h * v]; `attention_mask` is
        ignored, the mask is causal. T is T/cp when the ranks of a context-parallel group share the pack."""
        assert attention_bias is None
        masking = self.window, self.softcap, self.softmax_offset
        if packed_seq_params is None:
            if self.rotary is not None:
                cos, sin = self.rotary.at(torch.arange(len(query), device=query.device)[:, None, None], query.dtype)
                query, key = self.rotary.turned(query, key, cos, sin)
            q, k, v = (t.transpose(0, 1) for t in (query, key, value))
            return causal_attention(q, k, v, self.scale, *masking).transpose(0, 1)
        if self.cp_group is not None:
            query, key = self._rotated(query, key, packed_seq_params)
            return context_attention(query, key, value, packed_seq_params, self.cp_group, self.scale, *masking)
        batches = _batches_of(packed_seq_params)
        assert batches.back.numel() == query.shape[0], f"cu_seqlens end at {batches.back.numel()}, the pack has {query.shape[0]} tokens"
        query, key = self._rotated(query, key, packed_seq_params)
        outputs = []
        for rows in batches.rows:
            q, k, v = (t.index_select(0, rows.flatten()).view(*rows.shape, *t.shape[1:]) for t in (query, key, value))
            outputs.append(causal_attention(q, k, v, self.scale, *masking).flatten(0, 1))
        return torch.cat(outputs).index_select(0, batches.back)

    def _rotated(self, query: Tensor, key: Tensor, packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
        return (query, key) if self.rotary is None else self.rotary.turn(query, key, packed)
