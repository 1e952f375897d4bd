"""Makes the relative paths of a YAML file absolute; they are relative to the folder of that file.

Paths in command-line overrides are not changed; they are relative to the current folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_FUNCTION_IN_FILE = re.compile(r"(.+\.py)(:[A-Za-z_]\w*)")
_FUNCTION_IN_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_REWARD_MODEL = "model:"


def anchored(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make every relative path in `values`, from a YAML file in `folder`, absolute. Works in place and returns `values`. Values of a wrong
    type are not changed."""
    for key, resolve in PATHS.items():
        _rewrite(values, key.split("."), resolve, folder)
    return values


def is_user_code(text: str) -> bool:
    """Whether `text` has the form of a name in the user's code: `path/file.py:name` or `package.module:name`."""
    return bool(_FUNCTION_IN_FILE.fullmatch(text) or _FUNCTION_IN_MODULE.fullmatch(text))


def _rewrite(node: Any, parts: list[str], resolve: Resolve, folder: Path) -> None:
    """Apply `resolve` to the strings below `node` at the dotted key `parts`; `*` matches any list index and any key."""
    first, *rest = parts
    keys: Iterable[Any] = ()
    if isinstance(node, list):
        keys = range(len(node)) if first == "*" else ()
    elif isinstance(node, dict):
        keys = [key for key in node if first in ("*", key)]
    for key in keys:
        if rest:
            _rewrite(node[key], rest, resolve, folder)
        elif isinstance(node[key], str):
            node[key] = resolve(node[key], folder)


def _file(text: str, folder: Path) -> str:
    """Resolve the path of a file, which need not exist yet."""
    return os.path.abspath(folder / os.path.expanduser(text)) if text else text


def _folder_or_name(text: str, folder: Path) -> str:
    """Resolve a model or tokenizer. It is a path if it exists in `folder` or cannot be a hub name; else a hub name or `package:NAME`."""
    is_path = text.startswith((".", "~")) or text.count("/") > 1 or os.path.exists(folder / text)
    return _file(text, folder) if is_path else text


def _data(text: str, folder: Path) -> str:
    """Resolve a data source, like a model; a name with a suffix of a data file is a path."""
    return _file(text, folder) if text.endswith(DATA_SUFFIXES) else _folder_or_name(text, folder)


def _function(text: str, folder: Path) -> str:
    """Resolve `path/file.py:name` or `model:PATH`; other names are not changed."""
    if match := _FUNCTION_IN_FILE.fullmatch(text):
        return _file(match[1], folder) + match[2]
    if text.startswith(_REWARD_MODEL):
        return _REWARD_MODEL + _folder_or_name(text.removeprefix(_REWARD_MODEL), folder)
    return text


def _template(text: str, folder: Path) -> str:
    """Resolve the path of a chat template; Jinja text and single words are not changed."""
    return text if "{{" in text or "{%" in text or not ("." in text or "/" in text) else _file(text, folder)


class Resolve(Protocol):
    """Returns the text of a key with its relative path counted from `folder`."""

    def __call__(self, text: str, folder: Path) -> str: ...


PATHS: dict[str, Resolve] = {
    "model.path": _folder_or_name,
    "model.reference_path": _folder_or_name,
    "model.tokenizer": _folder_or_name,
    "run.callbacks.*": _function,
    "run.trackers.*": _function,
    "algorithm.loss_type": _function,
    "lora.adapter_path": _file,
    "data.train.source": _data,
    "data.eval.source": _data,
    "evaluation.sets.*.source": _data,
    "data.chat_template": _template,
    "rewards.functions.*.function": _function,
    "rewards.plugins.*": _file,
    "multi_turn.scheduler": _function,
    "multi_turn.tools.*": _function,
    "multi_turn.environment": _function,
    "rollout.urls_file": _file,
    "rollout.token_file": _file,
}
