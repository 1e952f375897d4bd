"""Reads the prompt in a row's column: text, or chat messages whose content is text."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from typing import Any

from megagrpo.data.images.image_values import IMAGE_PARTS, part_image
from megagrpo.data.tokens.tokenizer import Messages, Tokenizer
from megagrpo.platform.process.terminal import one_line
from megagrpo.row_image import content_text

_SHAREGPT = "; these are ShareGPT's names: rename `from` to role, `value` to content, and end with the user's message"
_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content)["']""")
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_PROBE = "megagrpo-probe"
_TOKEN, _OPENING = re.compile(r"<[|｜][^<>\s]*[|｜]>"), re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
# What begins a turn in usual templates: a prompt may be rendered for another model.
_USUAL = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|user|>", "<｜User｜>", "[INST]")


def as_prompt(value: Any, from_arrow: bool = False, images: bool = False) -> Messages:
    """Return a column's prompt. `from_arrow`: None fields are absent, as Arrow adds them to messages and tool calls.
    With `images` a content with parts of `IMAGE_PARTS` stays a list of parts.

    Parts of text are joined, and messages that are stored as JSON or Python text, as in a cell of csv, are read. Raises
    ValueError with a phrase for any other value.
    """
    if isinstance(value, str):
        return _as_messages(_parsed(value), from_arrow, images) if _LIKE_MESSAGES.match(value) else _encodable(value)
    return _as_messages(value, from_arrow, images)


def _parsed(text: str) -> Any:
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return parse(text)
    raise ValueError(f"begins like chat messages, and is not valid JSON ({text!r:.80}); write it with json.dumps")


def _as_messages(value: Any, from_arrow: bool, images: bool) -> list[dict[str, Any]]:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    ):
        sharegpt = (
            isinstance(value, list) and value and isinstance(value[0], dict) and {"from", "value"} <= value[0].keys()
        )
        raise ValueError(f"must be a string or chat messages (got {value!r:.200}){_SHAREGPT * bool(sharegpt)}")
    messages = []
    for number, message in enumerate(value):
        content = message.get("content")
        if images and isinstance(content, list) and any(map(_is_image, content)):
            content = [_part(part, number) for part in content]
        elif isinstance(content, list):
            content = "".join(_text(part, number) for part in content)
        elif content is None and message.get("tool_calls"):
            content = ""
        elif not isinstance(content, str):
            raise ValueError(f"must be chat messages whose content is text; message {number} has {content!r:.200}")
        fields = {
            name: field for name, field in (message | {"content": _checked(content)}).items() if field is not None
        }
        messages.append(_without_none(fields) if from_arrow else fields)
    return messages


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"holds {text[error.start]!r}, half a character, which no tokenizer knows; remove it"
        ) from None
    return text


def _checked(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    for part in [] if isinstance(content, str) else content:
        _encodable(part.get("text", ""))
    return _encodable(content) if isinstance(content, str) else content


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def _part(part: Any, number: int) -> dict[str, Any]:
    """Return {type: image}, with the image if the part holds one, or {type: text, text}."""
    if not _is_image(part):
        return {"type": "text", "text": _text(part, number)}
    image = part_image(part)
    return {"type": "image"} | ({} if image is None else {"image": image})


def _text(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        what = f"of type `{kind}`" if kind else f"{part!r:.80}"
        fix = "set data.images, or remove the part" if kind in IMAGE_PARTS else "remove the part, or the row"
        raise ValueError(f"must be text; message {number} has a part {what}: {fix}")
    return text


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(field) for name, field in value.items() if field is not None}
    return [_without_none(element) for element in value] if isinstance(value, list) else value


class RenderedPrompts:
    """Finds prompts that were rendered before: they hold what a chat template writes.

    Compares with the tokens around a user's message in `template` (the tokenizer's if None), with BOS at the beginning,
    and with the tokens of usual templates. Without a template nothing is rendered, and nothing found.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None):
        self._found: list[tuple[int, str]] = []
        self._inside: list[str] = []
        self._beginnings: list[str] = []
        self._frame = ""
        with contextlib.suppress(ValueError):  # a template that refuses this message; the rows show its error
            if frame := tokenizer.rendered([{"role": "user", "content": _PROBE}], None, template):
                before = frame.partition(_PROBE)[0].strip()
                bos = [tokenizer.token_text(i) for i in tokenizer.encode("", add_special_tokens=True)]
                tokens = dict.fromkeys([*_OPENING.findall(before)[-1:], *_TOKEN.findall(before), *_USUAL])
                self._inside = [token for token in tokens if token not in bos]
                first = _OPENING.match(before)
                self._beginnings = [text for text in (*bos, first and first[0]) if text]
                self._frame = before

    def see(self, row: int, prompt: Messages) -> None:
        """Look at the prompt of a row."""
        for text in [prompt] if isinstance(prompt, str) else [content_text(m["content"]) for m in prompt]:
            start = text.lstrip()
            marks = [*filter(start.startswith, self._beginnings), *(token for token in self._inside if token in text)]
            if marks or (self._frame and start.startswith(self._frame)):
                self._found.append((row, [*marks, self._frame][0]))
                return

    def warnings(self, key: str, total: int) -> list[str]:
        """Return a sentence if rendered prompts were seen."""
        if not self._found:
            return []
        row, mark = self._found[0]
        return [
            f"{key}: {len(self._found)} of {total} prompts already hold `{one_line(mark):.60}` (first: row {row}), and "
            "the chat template renders them again; for rendered prompts set data.chat_template: none, else remove the "
            "token"
        ]
