"""Tokenizers that read the images of prompts, with facts of the model in its folder."""

from __future__ import annotations

from pathlib import Path

from megagrpo.config import RunConfig
from megagrpo.data.images.prompt_images import ImageReader
from megagrpo.data.images.siglip_images import SquareImages
from megagrpo.data.tokens.tokenizer import Tokenizer, tokenizer_of
from megagrpo.families.hf_config import HfConfig, load_hf_config


def processor_of(config: RunConfig, folder: Path | str, hf_config: HfConfig | None = None) -> Tokenizer:
    """Return `tokenizer_of` the run, with `images` set if `data.images`. `folder` is the model's, or its hub name if
    `hf_config` is given. Raises ValueError as `tokenizer_of`, and for images that the model cannot have."""
    tokenizer = tokenizer_of(config, folder)
    if config.data.images:
        model = load_hf_config(folder) if hf_config is None else hf_config
        tokenizer.images = image_reader(folder, model, tokenizer)
    return tokenizer


def image_reader(folder: Path | str, model: HfConfig, tokenizer: Tokenizer) -> ImageReader:
    """Return the reader of a model's images. Raises ValueError for a model of text, for another image processor
    than the model's, and for images with more tokens than a window: vLLM then computes another mask than transformers.
    """
    if (vision := model.vision) is None:
        kind = f"a {model.wrapper.model_type}, trained on text only" if model.wrapper else "a model of text"
        raise ValueError(f"data.images: {folder} is {kind}; set it to false, or see docs/vision.md")
    if (square := vision.square) is None:
        return ImageReader(folder, vision.image_token, vision.merge)
    begin, part, end = (tokenizer.token_text(i) for i in (square.begin, vision.image_token, square.end))
    reader = SquareImages(
        folder, vision.image_token, vision.merge, side=square.pixels, patches=square.patches, tokens=(begin, part, end)
    )
    if (window := min(filter(None, model.windows), default=reader.count)) < reader.count:
        raise ValueError(
            f"data.images: an image has {reader.count} tokens (mm_tokens_per_image in {folder}/config.json), more than "
            f"sliding_window {window}; vLLM hides a part of the image, so set data.images to false"
        )
    reader.check()
    return reader
