"""A change to Megatron's use of FP8: any layers may be without it."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core import fp8_utils
from megatron.core.transformer.transformer_config import TransformerConfig


def keep_in_bf16(config: TransformerConfig, hybrid_layers: Iterable[int]) -> None:
    """Make Megatron skip the FP8 context it enters per layer for these hybrid layers, counted from 0 over all stages.

    Megatron itself only supports a number of first and of last layers.
    """
    config.bf16_layers = frozenset(hybrid_layers)
    fp8_utils.is_first_last_bf16_layer = _in_bf16


def _in_bf16(config: TransformerConfig, layer_no: int) -> bool:
    return layer_no in getattr(config, "bf16_layers", ())
