"""Images of rows as user code gets them: encoded, and opened where they are read."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, eq=False, repr=False)
class RowImage:
    """An image of a row: the bytes of its file, the path of its file, or a PIL image. Reward functions get `opened`.

    Imports only the standard library: every worker process reads this file.
    """

    content: bytes | str | Image.Image

    @property
    def encoded(self) -> bytes | str:
        """The image as bytes or as an absolute path, for another process of this host."""
        if isinstance(self.content, bytes | str):
            return self.content
        out = io.BytesIO()
        self.content.save(out, "PNG")
        return out.getvalue()

    def read(self) -> bytes:
        """Return the bytes of the image's file; of a PIL image those of a PNG."""
        encoded = self.encoded
        return Path(encoded).read_bytes() if isinstance(encoded, str) else encoded

    def opened(self) -> Image.Image:
        """Return the image, upright, and decoded only if it must be turned. Raises OSError, TypeError, SyntaxError or
        PIL's DecompressionBombError for what is no image."""
        from PIL import Image, ImageOps

        if isinstance(self.content, Image.Image):
            return self.content
        found = Image.open(io.BytesIO(self.content) if isinstance(self.content, bytes) else Path(self.content))
        ImageOps.exif_transpose(found, in_place=True)
        return found

    def __repr__(self) -> str:
        kind = type(self.content).__name__
        return f"<image {self.content if isinstance(self.content, str) else kind}>"


def has_images(value: object) -> bool:
    """Whether the value of a column is an image or a list of images."""
    return isinstance(value, RowImage) or (isinstance(value, list) and any(isinstance(v, RowImage) for v in value))


def without_images(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that hold no images."""
    return {name: value for name, value in columns.items() if not has_images(value)}


def json_image(value: Any) -> Any:
    """Return a value with PIL images, also in a list, as `data:` URLs with PNG. Other values are returned unchanged."""
    if isinstance(value, list):
        return [json_image(item) for item in value]
    if not type(value).__module__.startswith("PIL."):
        return value
    return "data:image/png;base64," + base64.b64encode(RowImage(value).read()).decode()


def content_text(content: str | list[dict[str, Any]]) -> str:
    """Return the content of a message as text, with [image] in place of an image."""
    return content if isinstance(content, str) else "".join(part.get("text", "[image]") for part in content)
