"""Vision towers of multimodal models, which transformers computes, and the place of their images among the tokens.
Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Raw = dict[str, Any]  # config.json as read
ROTARY = ("rope_scaling", "rope_parameters")  # sections of config.json with parameters of the rotation
_LEVELS = (8, 16, 24)  # blocks of Qwen3-VL's tower, if config.json does not name them
_AXES = ("mrope_section", "mrope_interleaved", "interleaved")


@dataclass(frozen=True)
class Vision:
    """The tower of a model, and how the text model sees its images.

    `axes` has the axis of the positions (0 time, 1 height, 2 width) that rotates each pair of a head's dimensions. An
    image begins at the position after the text before it, and its tokens have the rows and columns of the image as
    height and width. The text after it goes on after the largest position.

    With `levels` (DeepStack, arXiv 2406.04334) the tower returns features of that many of its own blocks too. Those of
    level i are added to the outputs of decoder block i at the image's tokens.
    """

    tower: str  # transformers' class, in the module of the whole model's `model_type`
    prefix: str  # of its tensors in files
    image_token: int  # id of the token that stands for an image
    merge: int  # patches in each direction that become one token
    axes: tuple[int, ...]
    levels: int = 0


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
        return Vision(tower, "visual.", token, merge, tuple(axes), levels)

    return read


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
