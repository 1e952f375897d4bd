"""Changes to Megatron's use of FP8: Transformer Engine's recipe, layers without FP8, and padding of routed tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megatron.core import fp8_utils
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megagrpo.policy.layers.megatron_modules import layers_of, mix_in

_megatrons_recipe = fp8_utils.get_fp8_recipe


def patch_recipe() -> None:
    """Make Megatron build the recipe `delayed` with the arguments of Transformer Engine 2.

    Megatron's own version passes arguments that Transformer Engine 2 no longer accepts.
    """
    fp8_utils.get_fp8_recipe = _recipe


def _recipe(config: TransformerConfig) -> Any:
    if config.fp8_recipe != "delayed":
        return _megatrons_recipe(config)
    from transformer_engine.common.recipe import DelayedScaling, Format

    return DelayedScaling(
        margin=config.fp8_margin,
        fp8_format=Format.HYBRID if config.fp8 == "hybrid" else Format.E4M3,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
    )


def keep_in_bf16(config: TransformerConfig, hybrid_layers: Iterable[int]) -> None:
    """Make Megatron skip the FP8 context it enters per layer for these hybrid layers, counted from 0 over all stages.

    Megatron itself only supports a number of first and of last layers. For recipe `delayed` see `leave_fp8`.
    """
    config.bf16_layers = frozenset(hybrid_layers)
    fp8_utils.is_first_last_bf16_layer = _in_bf16


def _in_bf16(config: TransformerConfig, layer_no: int) -> bool:
    return layer_no in getattr(config, "bf16_layers", ())


def leave_fp8(chunks: Sequence[nn.Module], bf16_layers: frozenset[int], layers_per_block: int) -> None:
    """Disable FP8 in the bare chunks' decoder layers `bf16_layers`, counted from 0, for recipe `delayed`. Its one
    Transformer Engine FP8 context spans all layers, so `keep_in_bf16` has no effect on the forward pass."""
    for layer in layers_of(chunks):
        if (layer.layer_number - 1) // layers_per_block in bf16_layers:
            mix_in(layer, OutsideFp8)


class OutsideFp8:
    """A layer that runs outside Transformer Engine's FP8 context."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output."""
        from transformer_engine.pytorch import autocast

        with autocast(enabled=False):
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # the layer's


def pad_routing(config: TransformerConfig, recipe: str) -> None:
    """Make Megatron's dispatcher pad each expert's tokens to the recipe's multiple when Megatron's FP8 is disabled."""
    config.moe_router_padding_for_quantization, config.routing_multiple = True, fp8_utils.get_fp8_align_size(recipe)
    token_dispatcher.get_align_size_for_quantization = _routing_multiple


def _routing_multiple(config: TransformerConfig) -> int:
    return config.routing_multiple
