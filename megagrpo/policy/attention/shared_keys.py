"""Keys and values that several blocks of a pack share (Gemma 3n, Gemma 4 E2B and E4B)."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megagrpo.policy.layers.bypass_gradient import detour, leaf_of

Pair = tuple[Tensor, Tensor]  # keys [T, 1, g, d], normed and not rotated, and values


def lend(packed: PackedSeqParams, block: int, pair: Pair, recomputes: bool) -> Pair:
    """Return keys and values of `block`, whose gradients include those of the blocks that `borrowed` them. With
    `recomputes` a pass with gradients may repeat the block inside an activation checkpoint; the first pass counts."""
    lent: dict[int, Pair] = vars(packed).setdefault("lent", {})
    if block not in lent or not (recomputes and torch.is_grad_enabled()):
        lent[block] = leaf_of(pair[0]), leaf_of(pair[1])
    key, value = (detour(own, own, leaf) for own, leaf in zip(pair, lent[block], strict=True))
    return key, value


def borrowed(packed: PackedSeqParams, block: int) -> Pair:
    """Return the keys and values that `block` has lent."""
    lent: dict[int, Pair] = vars(packed)["lent"]
    return lent[block]
