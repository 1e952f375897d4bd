"""Vision towers of multimodal models, which transformers computes, and the place of their images among the tokens.
Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from megagrpo.families.shared.tower_shape import TowerShape, qwen_tower, siglip_tower

Raw = dict[str, Any]  # config.json as read
ROTARY = ("rope_scaling", "rope_parameters")  # sections of config.json with parameters of the rotation
_LEVELS = (8, 16, 24)  # blocks of Qwen3-VL's tower, if config.json does not name them
_SIGLIP, _NESTED = "vision_tower.", "vision_tower.vision_model."
TOWER = "vision_tower"  # name of a trained tower among the modules of a chunk
_AXES = ("mrope_section", "mrope_interleaved", "interleaved")


@dataclass(frozen=True)
class Vision:
    """The tower of a model, and how the text model sees its images.

    `axes` has the axis of the positions (0 time, 1 height, 2 width) that rotates each pair of a head's dimensions. An
    image begins at the position after the text before it, and its tokens have the rows and columns of the image as
    height and width. The text after it goes on after the largest position.

    With `levels` (DeepStack, arXiv 2406.04334) the tower returns features of that many of its own blocks too. Those of
    level i are added to the outputs of decoder block i at the image's tokens.

    `trained` names the tower's tensors in its module if the tower is trained; (): it is frozen.

    Without `axes` all tokens have the positions of text. With `square` all images have one size, and the tokens of an
    image see each other in both directions.
    """

    tower: str  # transformers' class, in the module of the whole model's `model_type`
    prefix: str = field(compare=False)  # of its tensors in files
    image_token: int  # id of the token that stands for an image
    merge: int  # patches in each direction that become one token
    axes: tuple[int, ...] = ()
    levels: int = 0
    square: Square | None = None
    shape: TowerShape | None = None
    nested: bool = field(default=False, compare=False)  # files name a module more between SigLIP and its parts
    config: Raw = field(default_factory=dict, repr=False, compare=False)  # config.json of the whole model, as read
    trained: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def own_name(self, name: str) -> str | None:
        """Return the tower's own name of a tensor in files; None for a tensor of another part."""
        name = name.removeprefix("model.").replace(_NESTED, _SIGLIP)
        prefix = self.prefix.removeprefix("model.")
        return name.removeprefix(prefix) if name.startswith(prefix) else None

    def file_name(self, own: str) -> str:
        """Return the name in files of a tensor of the tower."""
        return self.prefix + (own.replace(_SIGLIP, _NESTED, 1) if self.nested else own)

    def in_files(self, names: Collection[str]) -> Vision:
        """Return the tower with the prefix and the nesting of the files' tensors `names`, if known."""
        inside = f"model.{self.prefix}"
        prefix = inside if any(name.startswith(inside) for name in names) else self.prefix
        return replace(self, prefix=prefix, nested=any(_NESTED in name for name in names))


@dataclass(frozen=True)
class Square:
    """Images of one size (Gemma 3), and the ids of the tokens `begin` and `end` around the tokens of an image. The chat
    template writes `begin` for an image."""

    patches: int  # in each direction
    pixels: int  # in each direction
    begin: int
    end: int


def qwen_vision(tower: str, interleaved: bool, deepstack: bool = False) -> Callable[[Raw], Vision | None]:
    """Return the reader of the tower of a Qwen from config.json. The axes of the rotation follow each other in
    sections, or are `interleaved`. Without sections the model is one of text."""

    def read(raw: Raw) -> Vision | None:
        text, of_tower = raw.get("text_config") or raw, raw.get("vision_config") or {}
        sections = [text[key]["mrope_section"] for key in ROTARY if "mrope_section" in (text.get(key) or {})]
        if not sections:
            return None
        time, height, width = sections[0]
        axes = [0] * time + [1] * height + [2] * width
        if interleaved:  # time, height, width, time, ...; the rest is time
            axes = [i % 3 if i < 3 * (0, height, width)[i % 3] else 0 for i in range(len(axes))]
        token, merge = raw.get("image_token_id", 151655), of_tower.get("spatial_merge_size", 2)
        levels = len(of_tower.get("deepstack_visual_indexes", _LEVELS)) if deepstack else 0
        shape = qwen_tower(tower, of_tower, levels)
        return Vision(tower, "visual.", token, merge, tuple(axes), levels, shape=shape, config=raw)

    return read


def square_vision(projector: str) -> Callable[[Raw], Vision | None]:
    """Return the reader of a tower of SigLIP for images of one size, followed by transformers' class `projector`."""

    def read(raw: Raw) -> Vision | None:
        if (tower := raw.get("vision_config")) is None:
            return None
        pixels, side = tower.get("image_size", 224), math.isqrt(raw.get("mm_tokens_per_image", 256))
        patches = pixels // tower.get("patch_size", 16)
        token, begin, end = (_id(raw, *one) for one in (("image", 262144), ("boi", 255999), ("eoi", 256000)))
        shape = siglip_tower(tower, (raw.get("text_config") or {}).get("hidden_size", 2304))
        square = Square(patches, pixels, begin, end)
        return Vision(projector, "", token, patches // side or 1, square=square, shape=shape, config=raw)

    return read


def _id(raw: Raw, kind: str, default: int) -> int:
    """Return the id of Gemma 3's token for a part of an image, before it (boi) or after it (eoi)."""
    return next((raw[key] for end in ("index", "id") if (key := f"{kind}_token_{end}") in raw), default)


def axis_problems(interleaved: bool) -> Callable[[Raw], list[str]]:
    """Return the check of config.json for the order of the axes: transformers' class has one, vLLM reads a key."""

    def problems(raw: Raw) -> list[str]:
        text = raw.get("text_config") or raw
        rotary = [text[key] for key in ROTARY if "mrope_section" in (text.get(key) or {})]
        return [
            f"config.json has mrope_interleaved={given.get('mrope_interleaved')} beside mrope_section; vLLM reads it, "
            f"and transformers computes {interleaved}; set mrope_interleaved to {str(interleaved).lower()} there"
            for given in rotary
            if bool(given.get("mrope_interleaved")) != interleaved
        ]

    return problems


def one_axis(text: Raw) -> Raw:
    """Return config.json of the text model without the axes of its rotation: those of text have equal positions."""
    plain = dict(text)
    for key in ROTARY:
        if isinstance(given := text.get(key), dict):
            rest = {name: value for name, value in given.items() if name not in _AXES}
            plain[key] = {name: "default" if value == "mrope" else value for name, value in rest.items()}
    return plain
