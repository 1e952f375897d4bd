"""Core attention in plain torch for packed sequences, with rotary positions. It runs without Transformer Engine.

A typical micro-batch on a CPU is 60 sequences of 50 tokens. One attention call per sequence would cost more than the
arithmetic.
Sequences of similar length are therefore gathered into right-padded batches: [T, heads, d] -> [S, L, heads, d]. Right
padding needs only the causal mask, because a real token never sees later tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megagrpo.families.shared.architecture import QueryScale
from megagrpo.policy.attention.causal import Ahead, Scores, Window, causal_attention
from megagrpo.policy.attention.context_parallel import MIN_FILL, context_attention
from megagrpo.policy.layers.elementwise import rotate
from megagrpo.train_types import moved


def pack_params(
    cu_seqlens: Tensor, prefixes: Tensor | None = None, indices: Tensor | None = None, positions: Tensor | None = None
) -> PackedSeqParams:
    """Return Megatron's description of a pack with sequence borders `cu_seqlens` [S + 1] int32, for batch size 1.

    `cu_seqlens` and `prefixes` are on the host. `positions` [T/cp] int64, on the layers' device, holds the position of
    each of this rank's tokens in its sample. None: computed from the borders, for layers on the host.

    `prefixes` [S] int64 holds the index of the sequence that each sequence continues, or -1. A sequence sees its
    prefix's tokens before its own, and its positions continue the prefix's. A prefix has no prefix of its own.
    `indices` [T/cp] int64 are the pack positions of a context-parallel rank's tokens (`context.rank_indices`); None
    when the rank holds all tokens.

    The mask is causal. A caller may set `last_seen` [T] int64 on the host: the position in its sample of the last token
    that each token sees, its own or a later one of the same sequence. Only `TorchAttention` reads it.
    """
    lengths = cu_seqlens.diff()
    before = prefix_lengths(lengths, prefixes)
    longest = int((lengths + before).max())
    if positions is None:
        positions = torch.arange(int(cu_seqlens[-1])) + (before - cu_seqlens[:-1]).repeat_interleave(lengths)
        positions = positions if indices is None else positions[indices]
    borders = moved(cu_seqlens, positions.device)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    # Transformer Engine needs these too; padding belongs to the sequence before it, and no token sees it
    if indices is not None:
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = borders
    packed.positions, packed.host_borders = positions, cu_seqlens
    packed.prefixes = None if prefixes is None else prefixes.tolist()
    packed.last_seen = None
    return packed


def prefix_lengths(lengths: Tensor, prefixes: Tensor | None) -> Tensor:
    """Return [S]: the number of prefix tokens that each sequence sees. `lengths` [S] exclude prefixes; same dtype."""
    if prefixes is None:
        return torch.zeros_like(lengths)
    return torch.where(prefixes < 0, 0, lengths[prefixes.clamp(min=0)])


@dataclass(frozen=True)
class Batches:
    """The batches of a pack, and the order that restores the pack from them.

    `rows[i]` [S_i, L_i] int64 are the pack positions of batch i: a prefix, the tokens that continue it, then padding
    that repeats position 0. `pack_order` [T] int64 is each token's index among the concatenated rows of all batches.
    `ahead[i]` are the tokens of batch i that see later ones, if any.
    """

    rows: tuple[Tensor, ...]
    pack_order: Tensor
    ahead: tuple[Ahead | None, ...]


def batch_sequences(
    borders: list[int], device: torch.device, prefixes: list[int] | None = None, last_seen: Tensor | None = None
) -> Batches:
    """Group the sequences between `borders` (cu_seqlens) by the number of tokens they see, prefixes included.
    `last_seen` [T] is the index in its sample of the last token that each token sees; None: its own."""
    spans = list(pairwise(borders))
    before = [(0, 0) if prefixes is None or prefixes[i] < 0 else spans[prefixes[i]] for i in range(len(spans))]
    # (tokens seen, start of the prefix, length of the prefix, start of the sequence)
    entries = sorted(
        ((q - p + b - a, p, q - p, a) for (a, b), (p, q) in zip(spans, before, strict=True) if b > a), reverse=True
    )
    groups: list[list[tuple[int, int, int, int]]] = []
    for entry in entries:
        if not groups or entry[0] < MIN_FILL * groups[-1][0][0]:
            groups.append([])
        groups[-1].append(entry)
    rows, ahead, pack_order, offset = [], list[Ahead | None](), torch.empty(borders[-1], dtype=torch.int64), 0
    for group in groups:
        seen, prefix_starts, prefix_sizes, starts = (
            torch.tensor(values)[:, None] for values in zip(*group, strict=True)
        )
        column = torch.arange(group[0][0])
        index = torch.where(column < prefix_sizes, prefix_starts + column, starts + column - prefix_sizes)
        index = torch.where(column < seen, index, 0)
        in_sequence = (column >= prefix_sizes) & (column < seen)
        pack_order[index[in_sequence]] = offset + torch.arange(index.numel()).view_as(index)[in_sequence]
        rows.append(moved(index, device))
        ahead.append(None if last_seen is None else _ahead(last_seen[index], in_sequence, device))
        offset += index.numel()
    return Batches(tuple(rows), moved(pack_order, device), tuple(ahead))


def _ahead(last: Tensor, in_sequence: Tensor, device: torch.device) -> Ahead | None:
    """Return the queries of a batch that see later keys; None if there are none. `last` [S, L] counts where
    `in_sequence`: the outputs of other queries are dropped."""
    own = torch.arange(last.shape[1]).expand_as(last)
    last = torch.where(in_sequence, last, own)
    most = int((last - own).max())
    return Ahead(moved(last, device), most) if most > 0 else None


def batches_of(packed: PackedSeqParams) -> Batches:
    """Return the batches of a pack. The first layer that asks computes them; they stay on the pack for the others."""
    if not hasattr(packed, "batches"):
        borders, device = packed.host_borders.tolist(), packed.positions.device
        packed.batches = batch_sequences(borders, device, packed.prefixes, packed.last_seen)
    return packed.batches


class Rotary:
    """Rotary positions: `frequencies` [n] float32, in radians per position, rotate the first 2n dimensions of a head.

    cos and sin are multiplied by `factor` (yarn's attention factor). `interleaved` is as in `elementwise.rotate`.
    """

    def __init__(self, frequencies: Tensor, factor: float = 1.0, interleaved: bool = False):
        self.frequencies, self.factor, self.interleaved = frequencies, factor, interleaved

    def rotate_pack(self, query: Tensor, key: Tensor, packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
        """Rotate query and key, [T, heads, d] or [T/cp, heads, d], by each token's position in its sample."""
        return self.rotate(query, key, *self.pack_cos_sin(packed, query.dtype))

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query and key [..., heads, d] by angles with these cos and sin [..., 1, n]."""
        return rotate(query, cos, sin, self.interleaved), rotate(key, cos, sin, self.interleaved)

    def rotate_at(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query and key [..., heads, d] by `positions` [..., 1]."""
        return self.rotate(query, key, *self.cos_sin(positions, query.dtype))

    def with_norms(self, query_norm: Any, key_norm: Any) -> NormedRotary:
        """Return this rotation, followed by the `normalise` of two norms (`head_norms.late`)."""
        return NormedRotary(self, query_norm, key_norm)

    def pack_cos_sin(self, packed: PackedSeqParams, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [T, 1, n] or [T/cp, 1, n], of the pack's positions, cached on `packed`."""
        rotations = vars(packed).setdefault("rotations", {})
        if self not in rotations:
            rotations[self] = self.cos_sin(packed.positions[:, None], dtype)
        return rotations[self]

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [*positions.shape, n] in `dtype`, computed in float32."""
        angles = positions[..., None] * self.frequencies
        return (self.factor * angles.cos()).to(dtype), (self.factor * angles.sin()).to(dtype)


class AxisRotary(Rotary):
    """Rotates each pair of dimensions by the position on its own axis: `axes` [n] int64 are rows of a pack's
    `axis_positions` [3, T]. Packs without them have equal positions on all axes."""

    def __init__(self, rotary: Rotary, axes: Tensor):
        super().__init__(rotary.frequencies, rotary.factor, rotary.interleaved)
        self.axes = axes

    def pack_cos_sin(self, packed: PackedSeqParams, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, 1, n], cached on `packed`."""
        if (positions := getattr(packed, "axis_positions", None)) is None:
            return super().pack_cos_sin(packed, dtype)
        rotations = vars(packed).setdefault("rotations", {})
        if self not in rotations:
            angles = positions.index_select(0, self.axes).t()[:, None] * self.frequencies
            rotations[self] = (self.factor * angles.cos()).to(dtype), (self.factor * angles.sin()).to(dtype)
        return rotations[self]


class NoRotary(Rotary):
    """Leaves queries and keys as they are."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(0))

    def rotate_pack(self, query: Tensor, key: Tensor, packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
        """Return query and key."""
        return query, key

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return query and key."""
        return query, key


class NormedRotary(Rotary):
    """Normalises queries and keys after the rotation by `rotary`, whose angles its packs share."""

    def __init__(self, rotary: Rotary, query_norm: Any, key_norm: Any):
        super().__init__(rotary.frequencies, rotary.factor, rotary.interleaved)
        self.rotary, self.norms = rotary, (query_norm, key_norm)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate and normalise query and key [..., heads, d]."""
        rotated = self.rotary.rotate(query, key, cos, sin)
        query, key = (norm.normalise(x) for norm, x in zip(self.norms, rotated, strict=True))
        return query, key

    def pack_cos_sin(self, packed: PackedSeqParams, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return those of `rotary`."""
        return self.rotary.pack_cos_sin(packed, dtype)


class ScaledRotary(Rotary):
    """Multiplies queries by `QueryScale`'s factor of their position, after the rotation by `rotary`."""

    def __init__(self, rotary: Rotary, scale: QueryScale):
        super().__init__(rotary.frequencies, rotary.factor, rotary.interleaved)
        self.rotary, self.scale = rotary, scale

    def rotate_pack(self, query: Tensor, key: Tensor, packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
        """Rotate query and key, and scale the query, by each token's position in its sample."""
        query, key = self.rotary.rotate_pack(query, key, packed)
        return self._scaled(query, packed.positions[:, None, None]), key

    def rotate_at(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query and key, and scale the query, by `positions`."""
        query, key = self.rotary.rotate_at(query, key, positions)
        return self._scaled(query, positions[..., None]), key

    def _scaled(self, query: Tensor, positions: Tensor) -> Tensor:
        steps = torch.floor((positions + self.scale.offset) / self.scale.length)
        return (query * (1 + self.scale.strength * torch.log1p(steps))).to(query.dtype)


class TorchAttention(MegatronModule):
    """Causal self-attention as a megatron-core `core_attention` module: packed (thd) or plain (sbhd), no dropout.

    It rotates queries and keys by `rotary`; Megatron's own rotation, much slower on packs, is off. `build._set_rotary`
    sets `rotary` and `softcap`, and windows that are chunks. Other windows come from Megatron's configuration.
    `softmax_offset` holds the sinks [h] of this rank's heads, or None. Megatron's own attention has the same parameter
    name and checkpoint key.
    """

    rotary: Rotary | None = None
    softcap: float | None = None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **sizes: int,
    ):
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal, f"the mask is always causal, not {attn_mask_type}"
        assert config.softmax_type in ("vanilla", "learnable"), f"no softmax of type {config.softmax_type}"
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout), (
            "no tensor-parallel dropout generator"
        )
        self.scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(config.kv_channels)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # Megatron's window size excludes the token itself
        self.window = Window(config.window_size[0] + 1) if windowed else None
        self.cp_group = pg_collection.cp if pg_collection is not None and pg_collection.cp.size() > 1 else None
        self.tp_group = pg_collection.tp if pg_collection is not None else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
            )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sinks, sharded over tensor-parallel ranks."""
        assert metadata is not None, "the state of TorchAttention needs the metadata of groups"
        state = self.state_dict(prefix="", keep_vars=True)
        groups = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

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
        """Packed: query [T, h, d], key [T, g, d], value [T, g, v] -> [T, h * v]. Plain: [L, S, h, d] -> [L, S, h * v].

        The mask is causal, but for a pack's `last_seen`; `attention_mask` is ignored. T is T/cp when a context-parallel
        group shares the pack.
        """
        assert attention_bias is None, "there is no bias on scores"
        scores = Scores(self.scale, self.softcap, self.softmax_offset)
        if packed_seq_params is None:
            if self.rotary is not None:
                positions = torch.arange(len(query), device=query.device)[:, None, None]
                query, key = self.rotary.rotate_at(query, key, positions)
            q, k, v = (t.transpose(0, 1) for t in (query, key, value))
            return causal_attention(q, k, v, scores, self.window).transpose(0, 1)
        if self.cp_group is not None:
            query, key = self._rotated(query, key, packed_seq_params)
            return context_attention(query, key, value, packed_seq_params, self.cp_group, scores, self.window)
        batches = batches_of(packed_seq_params)
        assert batches.pack_order.numel() == query.shape[0], (
            f"cu_seqlens end at {batches.pack_order.numel()}, the pack has {query.shape[0]} tokens"
        )
        query, key = self._rotated(query, key, packed_seq_params)
        outputs = []
        for rows, ahead in zip(batches.rows, batches.ahead, strict=True):
            q, k, v = (t.index_select(0, rows.flatten()).view(*rows.shape, *t.shape[1:]) for t in (query, key, value))
            outputs.append(causal_attention(q, k, v, scores, self.window, ahead).flatten(0, 1))
        return torch.cat(outputs).index_select(0, batches.pack_order)

    def _rotated(self, query: Tensor, key: Tensor, packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
        return (query, key) if self.rotary is None else self.rotary.rotate_pack(query, key, packed)
