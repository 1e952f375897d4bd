"""Images in requests to vLLM: pixels, hashes and places among the token ids, as `/inference/v1/generate` takes them.

vLLM reads an image's tensors from MessagePack in base64, and keeps what its tower computes by hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

_RAW = 3  # vLLM's code of an extension with the bytes of a tensor (vllm/v1/serial_utils.py)
_encode = msgspec.msgpack.Encoder().encode


def image_features(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's `features` of a prompt with `inputs` (`data.images.PromptImages`)."""
    pixels, grids = torch.as_tensor(inputs["pixel_values"]), torch.as_tensor(inputs["image_grid_thw"])
    # of Gemma 3's whole images: the number of crops and their image
    name, sizes = ("image_grid_thw", grids) if pixels.dim() == 2 else ("num_patches", torch.ones_like(grids[:, 0]))
    starts, ends = torch.as_tensor(inputs["image_starts"]).tolist(), sizes.view(len(grids), -1).prod(-1).cumsum(0)
    items = []
    for first, end, size in zip([0, *ends[:-1].tolist()], ends.tolist(), sizes, strict=True):
        flat = ["flat", {"slices": [[first, end, None]], "dim": 0, "keep_on_cpu": False}]
        fields = {
            "pixel_values": {"data": _tensor(pixels[first:end]), "field": flat},
            name: {"data": _tensor(size), "field": ["batched", {"keep_on_cpu": True}]},
        }
        items.append(base64.b64encode(_encode(fields)))
    lengths = np.array(inputs["image_tokens"]).tolist()
    return {
        "mm_hashes": {"image": [hashlib.blake2b(item, digest_size=16).hexdigest() for item in items]},
        "mm_placeholders": {"image": [dict(offset=at, length=n) for at, n in zip(starts, lengths, strict=True)]},
        "kwargs_data": {"image": [item.decode() for item in items]},
    }


def _tensor(tensor: torch.Tensor) -> list[Any]:
    content = msgspec.msgpack.Ext(_RAW, tensor.contiguous().numpy().tobytes())
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content]
