"""The bytes of a message of a `p2p` weight sync, and its description in errors.

A message holds its elements, padded to whole words of 8 bytes, and then a 64-bit checksum of each slice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megagrpo.sync.wire.messages import Message
from megagrpo.sync.wire.sync_plan import layer_of


def empty_message(message: Message, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a buffer for all bytes of a message with elements of `dtype`, [bytes] uint8 on `device`."""
    return torch.empty(_size_of_elements(message, dtype) + 8 * len(message.slices), dtype=torch.uint8, device=device)


def message_views(buffer: Tensor, message: Message, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two views of `buffer` [bytes] uint8: the message's elements [elements] of `dtype`, and the checksums
    [slices] int64."""
    count = _size_of_elements(message, dtype)
    return buffer[:count].view(dtype)[: message.elements], buffer[count:].view(torch.int64)


def describe(message: Message) -> str:
    """Return the layer and the tensors of a message, as text for errors."""
    layer, names = layer_of(message.slices[0].tensor), list(dict.fromkeys(item.tensor for item in message.slices))
    return f"{layer_text(layer)} ({names[0]}" + (f" and {len(names) - 1} more)" if len(names) > 1 else ")")


def layer_text(layer: int) -> str:
    """Return an index from `layer_of` as text for errors."""
    return f"layer {layer}" if layer >= 0 else "tensors outside of layers"


def _size_of_elements(message: Message, dtype: torch.dtype) -> int:
    """Return the bytes of the elements, rounded up to whole words of 8 bytes."""
    return -(-message.elements * dtype.itemsize // 8) * 8
