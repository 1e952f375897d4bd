"""Images of one size, each with the same number of tokens (Gemma 3): the text around them, and their pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagrpo.data.images.prompt_images import ImageReader, PromptImages


@dataclass(frozen=True, kw_only=True)
class SquareImages(ImageReader):
    """Reads images of `side` pixels and `patches` patches in each direction. `tokens` are the texts of the tokens
    before an image, for a part of an image, and after an image. The chat template writes the first one for an image."""

    side: int
    patches: int
    tokens: tuple[str, str, str]

    def check(self) -> None:
        """Raise ValueError if the tokenizer lacks a token, or if the model's folder has no image processor, or one that
        crops images or makes images of another size."""
        if not all(self.tokens):
            raise ValueError(
                f"data.images: the tokenizer has {list(self.tokens)} for the ids of images in {self.folder} "
                "(before, part, after); use the tokenizer of the model's release"
            )
        found, wanted = self.processor, {"height": self.side, "width": self.side}
        where = f"data.images: preprocessor_config.json in {self.folder} has"
        if getattr(found, "do_pan_and_scan", False):
            raise ValueError(f"{where} do_pan_and_scan; crops of images are not supported, so set it to false there")
        if (size := {name: getattr(found.size, name, None) for name in wanted}) != wanted:
            raise ValueError(
                f"{where} the size {size}, but images have {wanted}; copy the file from the model's release"
            )

    @property
    def count(self) -> int:
        """Number of tokens of an image."""
        return (self.patches // self.merge) ** 2

    def expanded(self, text: str) -> str:
        """Return the text with all tokens of each image, between empty lines, as transformers' processor writes it."""
        begin, part, end = self.tokens
        return text.replace(begin, f"\n\n{begin}{part * self.count}{end}\n\n")

    def placed(self, token_ids: Sequence[int], images: Sequence[Any]) -> tuple[tuple[int, ...], PromptImages]:
        """Return the token ids and the images. Raises ValueError if the ids are not those of so many images."""
        places = np.flatnonzero(np.array(token_ids) == self.token_id)
        starts, rest = places[:: self.count], np.arange(self.count)
        if len(starts) != len(images) or not np.array_equal(places, np.add.outer(starts, rest).flatten()):
            raise ValueError(
                f"renders {len(places)} image token(s) for {len(images)} image(s) of {self.count} tokens; text of the "
                f"prompt must hold none of {', '.join(self.tokens)}, and data.chat_template must write "
                f"{self.tokens[0]} for each image"
            )
        grids = np.array([self.grid(image) for image in images], np.int64)
        return tuple(token_ids), PromptImages(self, images, starts.tolist(), grids)

    def grid(self, image: Any) -> tuple[int, int, int]:
        """Return the patches of an image over time, height and width. Raises ValueError for an unreadable image."""
        self.size(image)
        return 1, self.patches, self.patches

    def pixels(self, images: Sequence[Any]) -> tuple[Tensor, np.ndarray]:
        """Return the pixels [k, 3, side, side] float32 of images, and their grids [k, 3]."""
        grids = np.array([[1, self.patches, self.patches]] * len(images), np.int64)
        return self.processed(images)["pixel_values"].to(torch.float32), grids
