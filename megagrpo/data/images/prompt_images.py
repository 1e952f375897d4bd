"""Images of prompts: where a row holds them, the tokens that stand for them, and their pixels, computed where they are
needed. Columns and parts of messages are as in TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagrpo.data.images.image_values import image_list, row_image
from megagrpo.row_image import ImageError, RowImage

Message = dict[str, Any]
IMAGE_COLUMNS = ("image", "images")
_OTHER_COLUMNS = ("videos", "audios")  # of TRL, verl and ms-swift
_PIXELS, _GRIDS, _STARTS, _TOKENS = "pixel_values", "image_grid_thw", "image_starts", "image_tokens"
_TAG = "<image>"
_FIX = "an image is a path below the data's folder, bytes, base64, a data: URL, or a dict with one of them"


class PromptImages(Mapping[str, Any]):
    """The images of one prompt, in order, as `Prompt.inputs`. Every rank may hold it: pixels are computed at each
    access, are not kept, and never travel between ranks.

    - `pixel_values` [n, d] float32: the n patches of all k images, from the processor of the model's folder; or whole
      images [k, 3, height, width]
    - `image_grid_thw` [k, 3] int64: each image's patches over time, height and width
    - `image_starts` [k] int64: index of each image's first token in the prompt
    - `image_tokens` [k] int64: each image's number of tokens
    """

    def __init__(self, reader: ImageReader, images: Sequence[Any], starts: Sequence[int], grids: np.ndarray):
        self._reader, self._images = reader, tuple(map(reader.located, images))
        tokens = grids.prod(-1) // reader.merge**2
        self._arrays = {_GRIDS: grids, _STARTS: np.array(starts, np.int64), _TOKENS: tokens}

    def __getitem__(self, name: str) -> Any:
        if name in self._arrays:
            return self._arrays[name]
        if name != _PIXELS:
            raise KeyError(name)
        pixels, grids = self._reader.pixels(self._images)
        if not np.array_equal(grids, self._arrays[_GRIDS]):
            raise ValueError(f"images {self._images!r:.200} have other sizes than when the prompts were read")
        return pixels

    def expanded(self, text: str) -> str:
        """Return the text of this prompt that is encoded, for the `text` that the chat template renders."""
        return self._reader.expanded(text)

    def placed(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of this prompt, rendered again with more text, with each image token repeated for its
        image. Raises ValueError if the images are no longer where they were."""
        placed, images = self._reader.placed(token_ids, self._images)
        if not np.array_equal(images[_STARTS], self._arrays[_STARTS]):
            raise ValueError("renders its images at other places; only text after the images may change")
        return placed

    def files(self) -> list[bytes]:
        """Return the files of the images, in order."""
        return [image.read() for image in self._images]

    def check(self) -> None:
        """Decode the images and keep nothing. Raises ValueError with a phrase for a damaged or changed image."""
        for image, grid in zip(self._images, self._arrays[_GRIDS].tolist(), strict=True):
            try:
                image.rgb()
            except ImageError as error:
                raise ValueError(f"has an image that {error}; save it again") from None
            if [*self._reader.grid(image)] != grid:
                raise ValueError(f"has an image whose size has changed since the start ({image!r}); restore it")

    __eq__, __hash__ = object.__eq__, object.__hash__  # only the same object is equal

    def __iter__(self) -> Iterator[str]:
        return iter((_PIXELS, *self._arrays))

    def __len__(self) -> int:
        return 4

    @property
    def lengths(self) -> tuple[int, ...]:
        """The bytes of the images' files, which are not read."""
        return tuple(image.length() for image in self._images)

    @property
    def key(self) -> tuple[bytes, ...]:
        """Equal for images with equal files, however a row holds them. Reads the files."""
        return tuple(image.key() for image in self._images)


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of rows, whose sizes give their numbers of tokens. `folder` is the model's, or its hub name,
    `token_id` its image token, and `merge` the number of patches in each direction that become one token. Paths are
    relative to `base`, and lead to files below it or below `caches`."""

    folder: Path | str
    token_id: int
    merge: int
    base: Path = Path()
    caches: tuple[Path, ...] = ()

    def beside(self, source: str) -> ImageReader:
        """Return the reader whose paths are below the folder of this data set, a file or folder, or, for what
        `datasets` has downloaded, in the caches of the hub."""
        import datasets
        import huggingface_hub

        path, hub = Path(source).expanduser(), Path(huggingface_hub.constants.HF_HUB_CACHE).resolve()
        folder = path if path.is_dir() else path.parent
        if not path.exists():  # a name of the hub
            folder = hub / f"datasets--{source.replace('/', '--')}"
        caches = [Path(datasets.config.DOWNLOADED_DATASETS_PATH)]
        if hub in folder.resolve().parents:  # its files are links into the repository's blobs
            caches.append(hub / folder.resolve().relative_to(hub).parts[0])
        return replace(self, base=folder, caches=tuple(caches))

    @cached_property
    def processor(self) -> Any:
        """transformers' image processor of the model's folder. Raises ValueError if it cannot be loaded."""
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(str(self.folder), trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"data.images: {self.folder} has no image processor that can be loaded: {error}; copy "
                "preprocessor_config.json from the model's release"
            ) from error

    def question(self, messages: list[Message], values: Mapping[str, Any]) -> tuple[list[Message], list[Any]]:
        """Return the messages with a part `{type: image}` for each image, and in order what the row holds as images.
        `messages` are from `as_prompt` with images. Without images they are returned unchanged.

        Raises ValueError with a phrase when images and parts do not match."""
        column = _of_columns(values)
        parts = [part for message in messages for part in _image_parts(message)]
        inline = [part["image"] for part in parts if "image" in part]
        tags = sum(map(_tags, messages))
        if tags and (parts or tags != len(column)):
            others = "parts of type image" if parts else f"{len(column)} image(s)"
            raise ValueError(
                f"has {tags} {_TAG} in its text, and {others}; write one {_TAG} for each image in the row's column, "
                "or none"
            )
        if not parts and not column:
            return messages, []
        if inline and (column or len(inline) < len(parts)):
            raise ValueError("has images both in messages and in a column; keep one of them")
        if parts and not inline and len(parts) != len(column):
            raise ValueError(f"has {len(parts)} parts of type image, and the row has {len(column)} image(s)")
        messages = [dict(message) for message in messages] if parts else _with_parts(messages, len(column), tags)
        for message in messages:
            message["content"] = [
                {"type": "image"} if part["type"] == "image" else part for part in _as_parts(message["content"])
            ]
        return messages, inline or column

    def expanded(self, text: str) -> str:
        """Return the text of a prompt with images that is encoded, for the `text` that the chat template renders."""
        return text

    def placed(self, token_ids: Sequence[int], images: Sequence[Any]) -> tuple[tuple[int, ...], PromptImages]:
        """Return the token ids of `expanded` with an image token for each part of an image, and the images. Raises
        ValueError."""
        places = [index for index, token_id in enumerate(token_ids) if token_id == self.token_id]
        if len(places) != len(images):
            raise ValueError(
                f"renders {len(places)} image token(s) for {len(images)} image(s); text of the prompt must not hold "
                "the image token, and data.chat_template must write one for each image"
            )
        grids = np.array([self.grid(image) for image in images], np.int64).reshape(-1, 3)
        counts = np.ones(len(token_ids), np.int64)
        counts[places] = grids.prod(-1) // self.merge**2
        starts = (counts.cumsum() - counts)[places]
        return tuple(np.repeat(token_ids, counts).tolist()), PromptImages(self, images, starts.tolist(), grids)

    def grid(self, image: Any) -> tuple[int, int, int]:
        """Return the patches of an image over time, height and width, from its size alone."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        p, (width, height) = self.processor, self.size(image)
        limits = dict(min_pixels=p.size["shortest_edge"], max_pixels=p.size["longest_edge"])
        try:
            tall, wide = smart_resize(height, width, factor=p.patch_size * p.merge_size, **limits)
        except ValueError as error:
            raise ValueError(
                f"has an image of {width} x {height} pixels ({error}); crop it, or remove the row"
            ) from None
        return 1, tall // p.patch_size, wide // p.patch_size

    def pixels(self, images: Sequence[Any]) -> tuple[Tensor, np.ndarray]:
        """Return `pixel_values` of images, and their grids [k, 3]."""
        made = self.processed(images)
        return made[_PIXELS].to(torch.float32), made[_GRIDS].numpy()

    def processed(self, images: Sequence[Any]) -> Mapping[str, Any]:
        """Return what the image processor makes of images."""
        return self.processor(images=[_read(self.located(image).rgb) for image in images], return_tensors="pt")

    def size(self, image: Any) -> tuple[int, int]:
        """Return width and height of an image that a row holds. Raises ValueError with a phrase for what is none."""
        return _read(lambda: self.located(image).size())

    def images(self, values: Sequence[Any]) -> list[RowImage]:
        """Return what a row holds as images, each with its bytes or an absolute path. Raises ValueError with a phrase
        for a value that is no image."""
        return [_read(partial(self.located, value)) for value in values]

    def located(self, image: Any) -> RowImage:
        """Return an image of a row, with its bytes or an absolute path. Raises ImageError for a value that is none."""
        return image if isinstance(image, RowImage) else row_image(image, (self.base, *self.caches))


class Undecoded(Sequence[dict[str, Any]]):
    """Rows of `datasets` whose images are not decoded, at any depth: dicts with bytes or path."""

    def __init__(self, rows: Any):
        self._rows = rows.with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        found = self._rows[index].to_pylist()
        return found if isinstance(index, slice) else found[0]


def undecoded(rows: Any) -> Any:
    """Return rows whose images are not decoded, if they are those of `datasets`."""
    import datasets

    return Undecoded(rows) if isinstance(rows, datasets.Dataset) else rows


def storable(value: Any) -> Any:
    """Return a value of a row with a dict with bytes in place of each PIL image."""
    if isinstance(value, dict):
        return {name: storable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(storable, value))
    return {"bytes": RowImage(value).read()} if type(value).__module__.startswith("PIL.") else value


def image_columns(values: Mapping[str, Any], images: Sequence[RowImage]) -> dict[str, Any]:
    """Return the image columns of a row with these `images` for reward functions: the ones it has, and `images` for
    images inside messages."""
    found: dict[str, Any] = {name: None for name in IMAGE_COLUMNS if name in values}
    if values.get("image") is not None:
        return found | {"image": images[0]}
    return found | {"images": list(images)} if images or values.get("images") is not None else found


def _read[T](action: Callable[[], T]) -> T:
    """Return what `action` reads of an image. Raises ValueError with a phrase for an image that cannot be read."""
    try:
        return action()
    except Exception as error:  # a cell can hold anything
        said = (
            str(error) if isinstance(error, ImageError) else f"cannot be read: {type(error).__name__}: {error!s:.200}"
        )
        raise ValueError(f"has an image that {said}; {_FIX}") from None


def _of_columns(values: Mapping[str, Any]) -> list[Any]:
    if other := next((name for name in _OTHER_COLUMNS if values.get(name)), None):
        raise ValueError(f"goes with column {other}, which no supported model reads; remove the row")
    one, several = values.get("image"), image_list(values.get("images"))
    if one is not None and several is not None:
        raise ValueError("goes with both columns image and images; keep one of them")
    if isinstance(one, list | tuple):
        raise ValueError("goes with column image, which must hold one image (got a list); use images for several")
    if several is not None and not isinstance(several, list | tuple):
        raise ValueError(
            f"goes with column images, which must be a list (got {type(several).__name__}); use image for a single one"
        )
    return list(several or []) if one is None else [one]


def _image_parts(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return [part for part in content if part["type"] == "image"] if isinstance(content, list) else []


def _tags(message: Message) -> int:
    return sum(part.get("text", "").count(_TAG) for part in _as_parts(message["content"]))


def _with_parts(messages: Sequence[Message], count: int, tags: int) -> list[Message]:
    """Return messages without parts of images with `count` of them: at the `tags` of the texts, else before the text of
    the user's first message. Raises ValueError with a phrase without a message of the user."""
    messages = [dict(message) for message in messages]
    if tags:  # as verl and ms-swift
        return [message | {"content": _at_tags(message["content"])} for message in messages]
    first = next((message for message in messages if message["role"] == "user"), None)  # as TRL
    if first is None:
        raise ValueError("has images, but no message of the user")
    first["content"] = [*({"type": "image"} for _ in range(count)), *_as_parts(first["content"])]
    return messages


def _as_parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _at_tags(text: str) -> list[dict[str, Any]]:
    """Return a text as parts, with an image in place of each tag."""
    pieces = [{"type": "text", "text": piece} for piece in text.split(_TAG)]
    parts = [part for piece in pieces for part in ({"type": "image"}, piece)][1:]
    return [part for part in parts if part.get("text") != ""] or pieces
