"""Images in requests to vLLM: pixels, hashes and places among the token ids, as `/inference/v1/generate` takes them.

vLLM reads an image's tensors from MessagePack in base64, and keeps what its tower computes by hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch

from megagrpo.data.images.prompt_images import PromptImages

_RAW = 3  # vLLM's code of an extension with the bytes of a tensor (vllm/v1/serial_utils.py)
_encode = msgspec.msgpack.Encoder().encode


_HASHES: WeakKeyDictionary[PromptImages, list[str]] = WeakKeyDictionary()  # of images whose pixels were computed


def image_features(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's `features` of a prompt with `inputs` (`data.images.PromptImages`)."""
    items = _items(inputs)
    hashes = [hashlib.blake2b(item, digest_size=16).hexdigest() for item in items]
    if isinstance(inputs, PromptImages):
        _HASHES[inputs] = hashes
    return _named(inputs, hashes) | {"kwargs_data": {"image": [item.decode() for item in items]}}


def image_names(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `image_features` without pixels, for a server that has them."""
    return _named(inputs, image_hashes(inputs))


def image_hashes(inputs: Mapping[str, Any]) -> list[str]:
    """Return the hash of each image. Pixels are computed if the hashes of these `inputs` are not known yet."""
    known = _HASHES.get(inputs) if isinstance(inputs, PromptImages) else None
    hashes: list[str] = known or image_features(inputs)["mm_hashes"]["image"]
    return hashes


def _named(inputs: Mapping[str, Any], hashes: list[str]) -> dict[str, Any]:
    starts, lengths = (np.array(inputs[name]).tolist() for name in ("image_starts", "image_tokens"))
    places = [dict(offset=at, length=length) for at, length in zip(starts, lengths, strict=True)]
    return {"mm_hashes": {"image": hashes}, "mm_placeholders": {"image": places}}


def _items(inputs: Mapping[str, Any]) -> list[bytes]:
    """Return the tensors of each image in vLLM's encoding, in base64."""
    pixels, grids = torch.as_tensor(inputs["pixel_values"]), torch.as_tensor(inputs["image_grid_thw"])
    # of Gemma 3's whole images: the number of crops and their image
    name, sizes = ("image_grid_thw", grids) if pixels.dim() == 2 else ("num_patches", torch.ones_like(grids[:, 0]))
    ends = sizes.view(len(grids), -1).prod(-1).cumsum(0)
    items = []
    for first, end, size in zip([0, *ends[:-1].tolist()], ends.tolist(), sizes, strict=True):
        flat = ["flat", {"slices": [[first, end, None]], "dim": 0, "keep_on_cpu": False}]
        fields = {
            "pixel_values": {"data": _tensor(pixels[first:end]), "field": flat},
            name: {"data": _tensor(size), "field": ["batched", {"keep_on_cpu": True}]},
        }
        items.append(base64.b64encode(_encode(fields)))
    return items


def _tensor(tensor: torch.Tensor) -> list[Any]:
    content = msgspec.msgpack.Ext(_RAW, tensor.contiguous().numpy().tobytes())
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content]
