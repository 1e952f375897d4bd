"""Tokenizers that read the images of prompts, with facts of the model in its folder."""

from __future__ import annotations

from pathlib import Path

from megagrpo.config import RunConfig
from megagrpo.data.images import ImageReader
from megagrpo.data.tokenizer import Tokenizer, tokenizer_of
from megagrpo.models.families.hf_config import HfConfig, load_hf_config


def processor_of(config: RunConfig, folder: Path | str, hf_config: HfConfig | None = None) -> Tokenizer:
    """Return `tokenizer_of` the run, with `images` set if `data.images`. `folder` is the model's, or its hub name if
    `hf_config` is given. Raises ValueError as `tokenizer_of`, and for images with a model of text."""
    tokenizer = tokenizer_of(config, folder)
    if config.data.images:
        model = load_hf_config(folder) if hf_config is None else hf_config
        if (vision := model.vision) is None:
            kind = f"a {model.wrapper.model_type}, trained on text only" if model.wrapper else "a model of text"
            raise ValueError(f"data.images: {folder} is {kind}; set it to false, or see docs/vision.md")
        tokenizer.images = ImageReader(folder, vision.image_token, vision.merge)
    return tokenizer
