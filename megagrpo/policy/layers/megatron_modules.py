"""Reads parts of Megatron's chunks and adds methods to them. Megatron's classes are untyped, so results are Any."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn


def decoder_of(chunk: nn.Module) -> Any:
    """Return the decoder of a bare chunk, a HybridStack."""
    return chunk.decoder


def config_of(chunk: nn.Module) -> Any:
    """Return Megatron's TransformerConfig of a bare chunk; all chunks and modules share it."""
    return chunk.config


def layers_of(chunks: Iterable[nn.Module]) -> list[Any]:
    """Return the decoder layers of the bare chunks of this rank: two for each decoder block
    (`specs.LAYERS_PER_BLOCK`)."""
    return [layer for chunk in chunks for layer in decoder_of(chunk).layers]


def mix_in(module: Any, mixin: type) -> None:
    """Give `module` the methods of `mixin` before its own. Its class becomes a subclass of both."""
    kind: Any = type(module)
    module.__class__ = _mixed(mixin, kind)


@functools.cache
def _mixed(mixin: Any, base: Any) -> type:
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})
