"""Multimodal models whose text model may be one of several families. Imports no torch."""

from __future__ import annotations

from typing import Any

from megagrpo.families.shared.wrapper import Naming, Wrapper

Raw = dict[str, Any]  # keys of config.json
# Keys of transformers' classes that published files leave out of `text_config`.
LLAMA_SIZES: Raw = dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
LLAMA_SIZES |= dict(vocab_size=32000, tie_word_embeddings=False)
MISTRAL_SIZES: Raw = LLAMA_SIZES | dict(intermediate_size=14336, num_key_value_heads=8)
QWEN_SIZES: Raw = LLAMA_SIZES | dict(intermediate_size=22016, num_key_value_heads=32, vocab_size=151936)

_TILES = ("image_grid_pinpoints", "vision_aspect_ratio", "use_image_newline_parameter")
_LLAVA: dict[str, Any] = dict(
    ignored=(*_TILES, "image_seq_length", "ignore_index"), untrained=(r"(model\.)?image_newline",), text_ties=True
)
# Of the connector. Files hold them in `text_config` too.
_CONNECTOR = ("scale_factor", "perceiver_config", "pixel_shuffle_factor", "qk_layer_norms", "use_resampler")
_TEXT_MODEL = Naming("model.text_model.")
_IDEFICS: dict[str, Any] = dict(
    prefix=_TEXT_MODEL.decoder, modules=_TEXT_MODEL, ignored=_CONNECTOR, untrained=(r"model\.connector\..+",)
)
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("LlavaForConditionalGeneration", _LLAVA),
    "llava_next": ("LlavaNextForConditionalGeneration", _LLAVA),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", _LLAVA),
    "internvl": ("InternVLForConditionalGeneration", dict(ignored=("downsample_ratio", "image_seq_length"))),
    "idefics3": ("Idefics3ForConditionalGeneration", _IDEFICS),
    "smolvlm": ("SmolVLMForConditionalGeneration", _IDEFICS),
}


def around(sizes: Raw, *kinds: str) -> tuple[Wrapper, ...]:
    """Return the multimodal models `kinds` around the text model of a family, whose class in transformers has `sizes`
    by default."""
    return tuple(Wrapper(kind, _KINDS[kind][0], defaults=sizes, **_KINDS[kind][1]) for kind in kinds)
