"""Sizes of the vision towers of Qwen's models and of Gemma 3, by transformers' class: parameters, and operations for an
image. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TowerShape:
    """The size of a tower. A patch passes all blocks; the merger makes a token of several patches."""

    parameters: int
    block_parameters: int  # of all blocks and of the patch embedding: each patch uses them
    merger_parameters: int  # of the merger and of DeepStack: each token uses them
    width: int
    whole: int  # blocks whose attention sees the whole image
    windowed: int  # blocks whose attention sees a window
    window: int  # patches in a window
    kept: int  # elements per patch that a block keeps for its backward pass

    @property
    def blocks(self) -> int:
        return self.whole + self.windowed

    def flops(self, patches: float, tokens: float) -> float:
        """Return the operations of a forward pass over an image of so many patches, which become `tokens`."""
        seen = self.whole * patches + self.windowed * min(self.window, patches)
        linears = patches * self.block_parameters + tokens * self.merger_parameters
        return 2 * linears + 4 * patches * seen * self.width


_COMMON = dict(depth=32, in_channels=3, patch_size=14, temporal_patch_size=2, spatial_merge_size=2)
_QWEN3 = _COMMON | dict(depth=27, hidden_size=1152, intermediate_size=4304, patch_size=16, out_hidden_size=3584)
_DEFAULTS: dict[str, dict[str, Any]] = {  # by the beginning of the class's name
    "Qwen2_5": _COMMON | dict(hidden_size=3584, intermediate_size=3420, out_hidden_size=3584, window_size=112),
    "Qwen2": _COMMON | dict(embed_dim=1280, hidden_size=3584, mlp_ratio=4),
    "Qwen3": _QWEN3 | dict(num_position_embeddings=2304),
}
_WHOLE = (7, 15, 23, 31)  # blocks of Qwen2.5-VL's tower without windows, if config.json does not name them


def qwen_tower(tower: str, given: dict[str, Any], levels: int) -> TowerShape:
    """Return the shape of transformers' class `tower` with `given`, the `vision_config` of config.json. `levels`
    are those of DeepStack."""
    kind = next(name for name in _DEFAULTS if tower.startswith(name))
    c = _DEFAULTS[kind] | given
    width, out = (c["embed_dim"], c["hidden_size"]) if kind == "Qwen2" else (c["hidden_size"], c["out_hidden_size"])
    inner = width * c["mlp_ratio"] if kind == "Qwen2" else c["intermediate_size"]
    merged, windows = width * c["spatial_merge_size"] ** 2, kind == "Qwen2_5"
    norms = 2 * width * (1 if windows else 2)  # with biases, if they are no RMS norms
    attention = 4 * (width * width + width)
    mlp = 3 * width * inner + 2 * inner + width if windows else 2 * width * inner + inner + width
    patch = c["in_channels"] * c["temporal_patch_size"] * c["patch_size"] ** 2 * width
    linears = merged * merged + merged + merged * out + out
    merger = linears + width * (1 if windows else 2) + levels * (linears + 2 * merged)
    positions = (c["num_position_embeddings"] + 1) * width if kind == "Qwen3" else 0  # with the bias of the patches
    blocks = patch + c["depth"] * (norms + attention + mlp)
    whole = len(c.get("fullatt_block_indexes", _WHOLE)) if windows else c["depth"]
    window = (c["window_size"] // c["patch_size"]) ** 2 if windows else 0
    # rotated queries and keys in float32; the quick GELU keeps two tensors more, RMS norms copies in float32
    kept = 15 * width + 4 * inner if windows else 11 * width + (3 if kind == "Qwen2" else 2) * inner
    return TowerShape(blocks + merger + positions, blocks, merger, width, whole, c["depth"] - whole, window, kept)


_SIGLIP = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_channels=3, image_size=224)


def siglip_tower(given: dict[str, Any], hidden: int) -> TowerShape:
    """Return the shape of a SigLIP with `given`, the `vision_config` of config.json, and of Gemma 3's projector to
    tokens of width `hidden`. Patches see those of their own image, and all images have one size."""
    c: dict[str, Any] = _SIGLIP | dict(patch_size=16, vision_use_head=True) | given
    width, inner, patches = c["hidden_size"], c["intermediate_size"], (c["image_size"] // c["patch_size"]) ** 2
    norm, attention = 2 * width, 4 * (width * width + width)
    mlp = 2 * width * inner + inner + width
    patch = (c["num_channels"] * c["patch_size"] ** 2 + 1) * width
    blocks = patch + c["num_hidden_layers"] * (2 * norm + attention + mlp)
    head = (width + attention + norm + mlp) if c["vision_use_head"] else 0
    projector = width + width * hidden
    whole = blocks + patches * width + norm + head + projector
    kept = 8 * width + 2 * inner
    return TowerShape(whole, blocks, projector, width, 0, c["num_hidden_layers"], patches, kept)
