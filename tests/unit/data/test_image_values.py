"""Images in every form in which data sets publish them: their pixels are those of vLLM's loader."""

import base64
import contextlib
import io
import json
import os
import socket
import struct
import zlib
from itertools import product
from pathlib import Path
from urllib.parse import quote

import datasets
import numpy as np
import pytest
from PIL import Image

from megagrpo.config import DatasetSection
from megagrpo.config.io import read_yaml
from megagrpo.data.images.image_values import row_image
from megagrpo.data.images.prompt_images import ImageReader
from megagrpo.data.prompt_values import as_prompt
from megagrpo.data.sources.data_sources import load_rows
from megagrpo.data.sources.text_files import wrong_kind
from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.families.hf_config import read_raw_config
from megagrpo.families.weight_sources import shape_folder
from megagrpo.row_image import ImageError, RowImage
from tests.unit.for_each import for_each

_VALUES = np.random.default_rng(0).integers(0, 256, (20, 30, 4), dtype=np.uint8)
RGBA = Image.fromarray(_VALUES)
RGB, PALETTE = RGBA.convert("RGB"), RGBA.convert("RGB").quantize(16)
GRAY_16 = Image.fromarray(np.linspace(0, 65535, 600).reshape(20, 30).astype(np.uint16))


def file_of(image: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def turned(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    return file_of(RGB, kind, exif=exif)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def late_exif(orientation: int) -> bytes:
    """A PNG that says after its pixels how it is turned."""
    exif, content = Image.Exif(), file_of(RGB, "PNG")
    exif[274] = orientation
    return content[:-12] + chunk(b"eXIf", exif.tobytes()[6:]) + content[-12:]


FILES = {
    "RGBA PNG": file_of(RGBA, "PNG"),
    "LA PNG": file_of(RGBA.convert("LA"), "PNG"),
    "palette": file_of(PALETTE, "PNG"),
    "palette with a clear color": file_of(PALETTE, "PNG", transparency=3),
    "palette with alpha": file_of(PALETTE, "PNG", transparency=bytes(range(0, 256, 16))),
    "gray with a clear value": file_of(RGBA.convert("L"), "PNG", transparency=7),
    "RGB with a clear color": file_of(RGB, "PNG", transparency=tuple(_VALUES[0, 0, :3].tolist())),
    "1 bit": file_of(RGBA.convert("1"), "PNG"),
    "APNG": file_of(RGBA, "PNG", save_all=True, append_images=[RGBA.rotate(180)]),
    "WebP with alpha": file_of(RGBA, "WEBP", lossless=True),
    "CMYK JPEG": file_of(RGBA.convert("CMYK"), "JPEG"),
    "gray JPEG": file_of(RGBA.convert("L"), "JPEG"),
    "animated GIF": file_of(PALETTE, "GIF", save_all=True, append_images=[PALETTE.rotate(180)], transparency=2),
    "RGBA TIFF": file_of(RGBA, "TIFF"),
    "RGBA AVIF": file_of(RGBA, "AVIF"),
    "JPEG 2000": file_of(RGBA, "JPEG2000"),
    "BMP": file_of(RGB, "BMP"),
    "turned after its pixels": late_exif(6),
    "broken EXIF": file_of(RGB, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"),
    "bytes after the end": file_of(RGB, "JPEG") + b"\0" * 1000,
} | {f"{kind} {n}": turned(kind, n) for kind in ("JPEG", "PNG", "WEBP", "TIFF") for n in range(1, 10)}


def text_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def broken_lines(text: str) -> str:
    return "\n".join(text[i : i + 76] for i in range(0, len(text), 76))


WAYS = {
    "bytes": lambda content: content,
    "struct": lambda content: dict(bytes=content, path=None),
    "base64 in a struct": lambda content: dict(bytes=text_of(content), path="lost.png"),
    "numbers in a struct": lambda content: dict(bytes=list(content)),
    "bare base64": text_of,
    "base64 in lines": lambda content: broken_lines(text_of(content)) + "\n",
    "url-safe without padding": lambda content: base64.urlsafe_b64encode(content).decode().rstrip("="),
    "base64 as bytes": lambda content: text_of(content).encode(),
    "data URL": lambda content: "data:image/png;base64," + text_of(content),
    "data URL without a type": lambda content: "data:;base64," + text_of(content),
    "data URL in capitals": lambda content: "DATA:Image/X;charset=utf-8;BASE64," + text_of(content),
    "data URL that is quoted": lambda content: "data:image/png;base64," + quote(text_of(content), safe=""),
    "data URL in percents": lambda content: "data:image/png," + quote(content),
    "data URL without ;base64": lambda content: "data:image/png," + text_of(content),
    "struct as Python text": lambda content: repr(dict(bytes=content, path=None)),
    "bytes as Python text": repr,
    "struct as JSON text": lambda content: json.dumps(dict(bytes=text_of(content))),
    "url part": lambda content: dict(type="image_url", image_url=dict(url="data:image/png;base64," + text_of(content))),
    "url part of Responses": lambda content: dict(type="input_image", image_url="data:;base64," + text_of(content)),
    "url": lambda content: dict(type="image", url="data:image/png;base64," + text_of(content)),
    "base64 key": lambda content: dict(type="image", base64=text_of(content)),
    "source": lambda content: dict(type="image", source=dict(type="base64", media_type="a/b", data=text_of(content))),
}


def theirs(content: bytes) -> np.ndarray:
    from vllm.multimodal.media.image import ImageMediaIO

    return np.asarray(ImageMediaIO().load_bytes(content).media)


@for_each("name", FILES)
def test_pixels_and_size_are_those_of_vllms_loader(name):
    image, expected = RowImage(FILES[name]), theirs(FILES[name])
    np.testing.assert_array_equal(image.rgb(), expected)
    np.testing.assert_array_equal(image.opened(), expected)
    assert image.size() == expected.shape[1::-1]


@for_each("way", WAYS)
def test_the_same_pixels_come_in_every_form(tmp_path, way):
    for name in ("RGBA PNG", "JPEG 6", "WEBP 5", "animated GIF"):
        content = FILES[name]
        value = WAYS[way](content)
        image = row_image(value, [tmp_path])
        np.testing.assert_array_equal(image.rgb(), theirs(content))
        assert image.key() == RowImage(content).key() != RowImage(FILES["RGBA TIFF"]).key()
        if isinstance(value, dict) and "type" in value:
            (message,) = as_prompt([dict(role="user", content=[value])], images=True)
            found = ImageReader(tmp_path, 0, 2).question([message], {})[1]
            np.testing.assert_array_equal(row_image(found[0], [tmp_path]).rgb(), theirs(content))


@for_each("form", ["one.png", "sub/../one.png", "link.png", "file://{}/one.png", "{}/one.png", " one.png\n"])
def test_a_path_leads_to_a_file_below_the_folder(tmp_path, form):
    (tmp_path / "sub").mkdir()
    (tmp_path / "one.png").write_bytes(FILES["RGBA PNG"])
    (tmp_path / "link.png").symlink_to("one.png")
    image = row_image(form.format(tmp_path), [tmp_path])
    np.testing.assert_array_equal(image.rgb(), theirs(FILES["RGBA PNG"]))
    assert image.key() == RowImage(FILES["RGBA PNG"]).key()


@for_each("kind", ["I;16 PNG", "I;16 TIFF", "PGM"])
def test_gray_of_16_bits_keeps_256_levels(kind):
    content = file_of(GRAY_16, kind.split()[-1]) if kind != "PGM" else b""
    if kind == "PGM":
        content = b"P5 30 20 65535\n" + np.asarray(GRAY_16).astype(">u2").tobytes()
    found = np.asarray(RowImage(content).rgb())
    np.testing.assert_array_equal(found[..., 0], np.asarray(GRAY_16) >> 8)
    assert len(np.unique(found)) == 256


def test_a_pil_image_is_read_as_its_file(tmp_path):
    for name in ("RGBA PNG", "JPEG 6", "palette with alpha"):
        image = RowImage(Image.open(io.BytesIO(FILES[name])))
        np.testing.assert_array_equal(image.rgb(), theirs(FILES[name]))
        np.testing.assert_array_equal(RowImage(image.read()).rgb(), theirs(FILES[name]))
        assert image.size() == image.opened().size == image.rgb().size


def png_of(width: int, height: int, pixels: bytes = b"\0" * 99) -> bytes:
    """A PNG that claims this size."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


@for_each(
    ("value", "said"),
    [
        (png_of(10_000, 10_000), "cannot be decoded: OSError"),
        (png_of(100_000, 100_000), "cannot be decoded: DecompressionBombError"),
        (FILES["JPEG 1"][:-100], "cannot be decoded: OSError: image file is truncated"),
        (FILES["RGBA PNG"][:-400], "cannot be decoded: "),
        (FILES["WebP with alpha"][:-400], "cannot be decoded: "),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is in none of the formats PNG, JPEG"),
        (file_of(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "has pixels of F, 32 bits"),
        ("https://example.org/a.png", "is an address .*; download"),
        ("A" * 9_000, "is neither a file nor base64 of an image: 'AAA"),
        (text_of(FILES["RGBA PNG"])[:-1] + "!", "is neither a file nor base64"),
        ("data:image/png;base64,%%%", "is not base64"),
        ("data:image/png", "without a comma"),
        ("a\0.png", "is neither a file"),
        (dict(url=None, path=None), "is a dict without an image"),
        (dict(bytes=[1, 300]), "that are not bytes"),
        (7, "is 7"),
        ("", "is ''"),
    ],
)
def test_a_value_that_is_no_image_is_named_shortly(tmp_path, value, said):
    with pytest.raises(ImageError, match=said) as error:
        row_image(value, [tmp_path]).size()
    assert len(str(error.value)) < 300


@pytest.fixture
def outside(tmp_path):
    (tmp_path / "secret.png").write_bytes(FILES["RGBA PNG"])
    folder = tmp_path / "data"
    (folder / "inner").mkdir(parents=True)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "folder").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo.png")
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "inner/../../secret.png",
        "link.png",
        "folder/secret.png",
        "{}/secret.png",
        "file://{}/secret.png",
    ],
)
def test_a_path_out_of_the_folder_is_refused(outside, name):
    with pytest.raises(ImageError, match="is outside of the data's folder"):
        row_image(name.format(outside.parent), [outside])


@pytest.mark.parametrize("name", ["fifo.png", "inner", "/dev/zero"])
def test_what_is_no_regular_file_is_never_opened(outside, name):
    folder = Path("/dev") if name.startswith("/dev") else outside
    with pytest.raises(ImageError, match="is no regular file"):
        row_image(name, [folder])
    for action in (RowImage(str(folder / name)).size, RowImage(str(folder / name)).read):
        with pytest.raises(ImageError, match="is no regular file"):
            action()


def saved(folder: Path) -> None:
    datasets.Dataset.from_list([dict(prompt="a")]).save_to_disk(str(folder))


FIFOS = {  # the name of a file, and what reads it
    "run.yaml": read_yaml,
    "config.json": read_raw_config,
    "rows.jsonl": lambda path: load_rows(DatasetSection(source=str(path)), "data.train", 0, "prompt"),
    "rows.parquet": lambda path: load_rows(DatasetSection(source=str(path)), "data.train", 0, "prompt"),
    "state.json": lambda path: load_rows(DatasetSection(source=str(path.parent)), "data.train", 0, "prompt"),
    "tokenizer.json": lambda path: load_tokenizer(path.parent),
    "generation_config.json": lambda path: shape_folder(str(path.parent)),
    "a file in the way": lambda path: wrong_kind(path),
}


@pytest.mark.timeout(60)
@for_each(("name", "kind"), [*product(FIFOS, ["FIFO", "device", "socket"])])
def test_a_file_of_the_run_that_is_no_regular_file_is_named(tmp_path, name, kind, monkeypatch):
    path = tmp_path / name
    if name == "state.json":
        saved(tmp_path)
        path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        monkeypatch.chdir(tmp_path)  # an address has at most 108 characters
        socket.socket(socket.AF_UNIX).bind(name)
    with pytest.raises((ValueError, OSError), match="no regular file") as error:
        FIFOS[name](tmp_path if name == "config.json" else path)
    assert str(path) in str(error.value)


@for_each("kind", ["AVIF", "PNG", "WEBP", "GIF", "TIFF", "JPEG2000", "JPEG", "BMP", "PPM"])
def test_any_error_of_a_decoder_is_the_image_s(kind):
    content, chance = file_of(RGB, kind), np.random.default_rng(1)
    for _ in range(40):
        damaged = bytearray(content)
        for place in chance.integers(0, len(content), 20):
            damaged[place] = chance.integers(256)
        image = RowImage(bytes(damaged))
        for action in (image.size, image.rgb, image.opened, image.key):
            with contextlib.suppress(ImageError):
                action()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_size_of_a_whole_file_is_read_without_decoding(monkeypatch, kind):
    content = turned(kind, 6)
    monkeypatch.setattr("megagrpo.row_image._rgb", None)  # a call would fail
    assert RowImage(content).size() == (20, 30)
