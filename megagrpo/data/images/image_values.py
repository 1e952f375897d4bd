"""Images as public data sets write them in a row: bytes, base64, `data:` URLs, parts of messages, dicts, and paths."""

from __future__ import annotations

import ast
import base64
import binascii
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from megagrpo.row_image import ImageError, RowImage

# Names under which dicts hold an image: those of `datasets`, of parts of messages, and of APIs.
IMAGE_FIELDS = ("bytes", "image", "image_url", "url", "base64", "b64_json", "data", "source", "path")
ENCODED = ("bytes", "base64", "b64_json", "data")  # their text is base64, never a path
IMAGE_PARTS = ("image", "image_url", "input_image")  # types of parts of messages that hold an image
_MAX_DEPTH = 4
# How the files of images begin. Base64 of a JPEG, `/9j/...`, looks like a path.
_SIGNATURES = (
    *(b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*"),
    *(b"P1", b"P2", b"P3", b"P4", b"P5", b"P6", b"\xff\x4f\xff\x51"),
)
_BOXES = (b"ftyp", b"jP  ")  # at byte 4 of AVIF and JPEG 2000
_SHORTEST = 48  # characters of base64 of an image, at least
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SHOWN = 60  # characters of a value in a message


def row_image(value: Any, folders: Sequence[Path], depth: int = 0) -> RowImage:
    """Return the image that a value of a row is. Relative paths are below the first of the `folders`.

    Raises ImageError for a value that is no image, and for a path that leads out of the folders or to no regular file.
    """
    if isinstance(value, str) and (literal := _literal(value)) is not None:
        value = literal
    if type(value).__module__.startswith("PIL."):
        return RowImage(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return RowImage(_from_bytes(bytes(value)))
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        name = next((name for name in IMAGE_FIELDS if value.get(name)), None)
        if name is None:
            raise ImageError(f"is a dict without an image (keys: {', '.join(map(str, value)):.{_SHOWN}})")
        return _field(name, value[name], folders, depth)
    if isinstance(value, str | Path) and str(value).strip():
        return _from_text(str(value), folders)
    raise ImageError(f"is {_shown(value)}")


def image_list(value: Any) -> Any:
    """Return the list that a cell of csv writes as JSON or Python text; any other value unchanged."""
    found = _literal(value) if isinstance(value, str) else None
    return found if isinstance(found, list) else value


def part_image(part: Mapping[str, Any]) -> Any:
    """Return the value of a message's part of `IMAGE_PARTS` that holds the image; None for a placeholder."""
    return next((part[name] for name in IMAGE_FIELDS if part.get(name) is not None), None)


def _field(name: str, value: Any, folders: Sequence[Path], depth: int) -> RowImage:
    if name == "bytes" and isinstance(value, list):  # as `datasets` and pandas write bytes into JSON
        with contextlib.suppress(ValueError, TypeError):
            return RowImage(bytes(value))
        raise ImageError("has a list of numbers in `bytes` that are not bytes")
    if name in ENCODED and isinstance(value, str) and not value.lstrip()[:5].lower() == "data:":
        return RowImage(_decoded(value))
    return row_image(value, folders, depth + 1)


def _from_bytes(content: bytes) -> bytes:
    """Return the content of an image's file; of bytes that hold base64 or a `data:` URL what they encode."""
    if _is_file(content):
        return content
    with contextlib.suppress(UnicodeDecodeError):
        text = content.decode("ascii").strip()
        return _data_url(text) if text[:5].lower() == "data:" else _bare_base64(text) or content
    return content


def _from_text(text: str, folders: Sequence[Path]) -> RowImage:
    text = text.strip()
    if text[:5].lower() == "data:":
        return RowImage(_data_url(text))
    if text[:7].lower() == "file://":
        return RowImage(_below(unquote(text[7:].removeprefix("localhost")), folders))
    if _SCHEME.match(text):
        raise ImageError(f"is an address ({_shown(text)}); download the files and name their paths")
    if (content := _bare_base64(text)) is not None:
        return RowImage(content)
    return RowImage(_below(text, folders))


def _below(text: str, folders: Sequence[Path]) -> str:
    """Return the absolute path of a regular file below one of the folders, with all links resolved."""
    try:
        path = (folders[0] / Path(text).expanduser()).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:  # the last two: a NUL, no home folder, a loop of links
        said = getattr(error, "strerror", None) or str(error)
        raise ImageError(f"is neither a file nor base64 of an image: {_shown(text)} ({said})") from None
    if not any(path.is_relative_to(folder.resolve()) for folder in folders):
        raise ImageError(
            f"is outside of the data's folder: {_shown(text)} leads to {path}, not below {folders[0].resolve()}; "
            "copy the file there"
        )
    if not path.is_file():
        raise ImageError(f"is no regular file: {_shown(text)}")
    return str(path)


def _data_url(text: str) -> bytes:
    """Return the content of a `data:` URL (RFC 2397): base64 or percent-encoded, names in any case."""
    head, comma, content = text.partition(",")
    if not comma:
        raise ImageError(f"is a data: URL without a comma ({_shown(text)})")
    packed = unquote(content) if "%" in content else content
    if any(word.strip() == "base64" for word in head.lower()[5:].split(";")):
        return _decoded(packed)
    return _bare_base64(packed) or unquote_to_bytes(content)


def _decoded(text: str) -> bytes:
    """Return the bytes of base64: standard or url-safe, with line breaks, with or without padding."""
    packed = "".join(text.split()).rstrip("=")
    standard = packed.translate(str.maketrans("-_", "+/"))
    try:
        return base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"is not base64: {_shown(text)} ({error})") from None


def _bare_base64(text: str) -> bytes | None:
    """Return the bytes of a text that is base64 of an image's file; None for another text."""
    if len(text) < _SHORTEST or not _BASE64.match(text[:_SHORTEST]):
        return None
    try:
        return _decoded(text) if _is_file(_decoded(text[:_SHORTEST].split()[0][:16])) else None
    except ImageError:
        return None


def _is_file(begin: bytes) -> bool:
    return begin.startswith(_SIGNATURES) or begin[4:8] in _BOXES


def _literal(text: str) -> Any:
    """Return the dict, list or bytes that a text writes as JSON or Python; None for another text."""
    if not text.lstrip().startswith(("{", "[", "b'", 'b"')):
        return None
    for parse in (json.loads, lambda words: ast.literal_eval(words.strip())):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            found = parse(text)
            return found if isinstance(found, dict | list | bytes) else None
    return None


def _shown(value: Any) -> str:
    text = repr(value[:_SHOWN] if isinstance(value, str | bytes | list | tuple) else value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
