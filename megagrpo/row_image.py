"""Images of rows: encoded for another process, and opened as vLLM opens them, for policy, rewards and audit alike."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megagrpo.regular_files import NotRegular, open_regular

if TYPE_CHECKING:
    from PIL import Image

# The decoders that data reaches. Pillow has others: its EPS reader runs Ghostscript.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND", "WEBP": b""}  # formats whose header is enough
_LATE = b"eXIf", b"XML:com.adobe.xmp", b"Raw profile type exif"  # a PNG may say after its pixels how it is turned
_SAMPLE = 1 << 17  # bytes at the end of a file that are looked at
_MAX_RATIO = 1000  # pixels per byte of a file; deflate reaches 1,032


class ImageError(ValueError):
    """An image that cannot be read. The message is a phrase without the file's content."""


@dataclass(frozen=True, eq=False, repr=False)
class RowImage:
    """An image of a row: the bytes of its file, the path of its file, or a PIL image. Reward functions get `opened`.

    All methods raise ImageError for an image that cannot be read, whatever the decoder raises. Imports the
    standard library almost alone: every worker process reads this file.
    """

    content: bytes | str | Image.Image

    @property
    def encoded(self) -> bytes | str:
        """The image as bytes or as an absolute path, for another process of this host."""
        if isinstance(self.content, bytes | str):
            return self.content
        out = io.BytesIO()
        self.rgb().save(out, "PNG")
        return out.getvalue()

    def read(self) -> bytes:
        """Return the bytes of the image's file; of a PIL image those of a PNG."""
        if not isinstance(self.content, str):
            return bytes(self.encoded)  # type: ignore[arg-type]  # no path
        with self._errors(), self._file() as file:
            return file.read()

    def opened(self) -> Image.Image:
        """Return the image, upright and in RGB. It is decoded only when needed: to turn or to convert it."""
        with self._errors():
            image = self._image()
            return image if image.mode == "RGB" and self._plain(image) and not _is_turned(image) else _rgb(image)

    def rgb(self) -> Image.Image:
        """Return the image decoded, upright and in RGB, with the pixels that vLLM's loader (`ImageMediaIO`) has."""
        with self._errors():
            return _rgb(self._image())

    def size(self) -> tuple[int, int]:
        """Return width and height of `rgb` from the file's header.

        Decodes files that are cut off or claim more pixels than they can hold, and formats other than JPEG, PNG and
        WebP."""
        with self._errors():
            image = self._image()
            if not self._plain(image):
                return _rgb(image).size
            return image.size[::-1] if _is_turned(image) > 1 else image.size

    def length(self) -> int:
        """Return the bytes of the image's file, which is not read; 0 for a PIL image."""
        with self._errors():
            if isinstance(self.content, str):
                return os.stat(self.content).st_size
            return len(self.content) if isinstance(self.content, bytes) else 0

    def key(self) -> bytes:
        """Return a digest of the whole file, or of a PIL image's pixels."""
        with self._errors():
            file = self._file() if isinstance(self.content, bytes | str) else io.BytesIO(self.rgb().tobytes())
            with file:
                return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn any exception of a decoder into ImageError."""
        try:
            yield
        except ImageError:
            raise
        except Exception as error:
            from PIL import UnidentifiedImageError

            where = f" ({self.content})" if isinstance(self.content, str) else ""
            if isinstance(error, UnidentifiedImageError):
                raise ImageError(f"is in none of the formats {', '.join(FORMATS)}{where}") from None
            said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ImageError(f"cannot be decoded: {type(error).__name__}: {said:.200}{where}") from error

    def _file(self) -> io.BufferedReader | io.BytesIO:
        if not isinstance(self.content, str):
            return io.BytesIO(self.content)  # type: ignore[arg-type]  # no PIL image
        try:
            return open_regular(self.content)
        except NotRegular:
            raise ImageError(f"is no regular file ({self.content})") from None

    def _image(self) -> Image.Image:
        from PIL import Image

        if isinstance(self.content, Image.Image):
            return self.content
        return Image.open(self._file(), formats=FORMATS)

    def _plain(self, image: Image.Image) -> bool:
        """Whether the header of an opened file says all: size, and how the image is turned."""
        if image.format not in _ENDS or image is self.content:
            return False
        with self._file() as file:
            length, tail = file.seek(0, 2), _tail(file)
            if image.format == "WEBP":
                file.seek(4)
                if int.from_bytes(file.read(4), "little") + 8 > length:
                    return False
        late = image.format == "PNG" and any(mark in tail.rpartition(b"IDAT")[2] for mark in _LATE)
        return not late and _ENDS[image.format] in tail and image.width * image.height <= _MAX_RATIO * length

    def __repr__(self) -> str:
        kind = type(self.content).__name__
        return f"<image {self.content if isinstance(self.content, str) else kind}>"


def _tail(file: io.BufferedReader | io.BytesIO) -> bytes:
    file.seek(max(0, file.seek(0, 2) - _SAMPLE))
    return file.read()


def _is_turned(image: Image.Image) -> int:
    """Return 0 for an upright image, 1 for one that is flipped, 2 for one whose width becomes its height."""
    from PIL import Image, ImageOps

    before = probe = Image.frombytes("L", (3, 2), bytes(range(6)))
    probe.info = dict(image.info)
    with contextlib.suppress(Exception):  # as vLLM: an image with broken EXIF stays as it is
        probe = ImageOps.exif_transpose(probe)
    return 2 if probe.size == (2, 3) else int(probe.tobytes() != before.tobytes())


def _rgb(image: Image.Image) -> Image.Image:
    """Return an image upright and in RGB, on white where it is transparent, as vLLM's `convert_image_mode`. Unlike
    vLLM, 16-bit gray becomes 8 bits instead of white."""
    from PIL import Image, ImageOps

    is_pgm = image.format == "PPM"
    with contextlib.suppress(Exception):
        image = ImageOps.exif_transpose(image)
    image.load()
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and is_pgm):
        image = _eight_bits(image)
    if image.mode in ("I", "F"):
        raise ImageError(f"has pixels of {image.mode}, 32 bits without a known range; save it with 8 or 16 bits")
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    image = image if image.mode == "RGBA" else image.convert("RGBA")
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return the high bytes of 16-bit gray, as Pillow reads 16-bit RGB; white where it is transparent."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image).astype(np.uint16)
    gray = (values >> 8).astype(np.uint8)
    if (clear := image.info.get("transparency")) is not None:
        gray[values == clear] = 255
    return Image.fromarray(gray)


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
