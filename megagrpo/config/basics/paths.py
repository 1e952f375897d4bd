"""Makes the relative paths of a config absolute: one rule for every key of `PATHS`.

A path in a YAML file counts from the folder of that file; a path on the command line or from Python counts from the
current folder. `~` is the home folder, `~user` another user's. Variables such as `$HOME` are not expanded. A key that
also holds names of the hub holds a path when the text cannot be a name, or when a file or folder of that name exists
there or in the current folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.config.basics.problems import Problem
from megagrpo.config.basics.yaml_text import odd_text

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")  # also with one of COMPRESSED after it
COMPRESSED = (".gz", ".zst", ".bz2")
DATA_SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".arrow")
_FUNCTION_IN_FILE = re.compile(r"(.+\.py)(:[A-Za-z_]\w*)", re.DOTALL)
_FUNCTION_IN_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_COLUMN = re.compile(r"\{\w+\}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_OTHER_NAMES = ("package:", "reasoning_gym:")
_REWARD_MODEL = "model:"
SHIPPED = "megagrpo:"  # before the name of a shipped config in `defaults:`, in `tasks` and on the command line
_PLAIN_TEXT = "none"  # the value of data.chat_template for plain-text prompts
type Resolve = Callable[[str, Path], str]  # returns a key's text with its relative path counted from the folder


def anchored(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make every relative path in `values`, from a YAML file in `folder`, absolute. Works in place and returns
    `values`. Values of a wrong type are not changed."""
    for owner, name, _, resolve in _texts(values):
        owner[name] = resolve(owner[name], folder)
    tasks = found if isinstance(found := values.get("tasks"), list) else []
    for i, task in enumerate(tasks):
        if isinstance(task, dict):
            anchored(task, folder)  # it has sections of a run
        elif isinstance(task, str) and not task.startswith(SHIPPED):
            tasks[i] = _file(task, folder)
    return values


def path_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield paths that are empty, below the home folder of a user that this machine does not have, or not UTF-8."""
    for owner, name, key, _ in _texts(config.model_dump()):
        text = owner[name].removeprefix(_REWARD_MODEL)
        if not text and key == "data.train.source":
            if not config.tasks:
                yield Problem(("data.train", "tasks"), "required, but missing; set it")
        elif not text:
            yield Problem((key,), "must not be empty; write a name or a path, or leave it out")
        elif text.startswith("~"):
            user = text[1:].split("/")[0]
            yield Problem((key,), f"{text}: this machine has no user {user}; write the folder out")
        elif odd := odd_text(text):  # a folder of the config whose name is not UTF-8
            yield Problem((key,), odd)


def paths_in(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield key and absolute path of each file and folder that a config names, without the name of a function in it."""
    for owner, name, key, _ in _texts(config.model_dump()):
        in_file = _FUNCTION_IN_FILE.fullmatch(owner[name])
        path = in_file[1] if in_file else owner[name].removeprefix(_REWARD_MODEL)
        if os.path.isabs(path):
            yield key, path


def is_user_code(text: str) -> bool:
    """Whether `text` has the form of a name in the user's code: `path/file.py:name` or `package.module:name`."""
    return bool(_FUNCTION_IN_FILE.fullmatch(text) or _FUNCTION_IN_MODULE.fullmatch(text))


def _texts(values: dict[str, Any]) -> Iterator[tuple[Any, Any, str, Resolve]]:
    """Yield (owner, index or name, dotted key, resolver) of every text at a key of `PATHS`."""
    for pattern, resolve in PATHS.items():
        for owner, name, key in _strings(values, pattern.split(".")):
            yield owner, name, key, resolve


def _strings(node: Any, parts: list[str], above: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yield (owner, index or name, dotted key) of strings in `node` at key `parts`; `*` matches any index or name."""
    first, *rest = parts
    names: Iterable[Any] = ()
    if isinstance(node, list):
        names = range(len(node)) if first == "*" else ()
    elif isinstance(node, dict):
        names = [name for name in node if first in ("*", name)]
    for name in names:
        if rest:
            yield from _strings(node[name], rest, f"{above}{name}.")
        elif isinstance(node[name], str):
            yield node, name, f"{above}{name}"


def _file(text: str, folder: Path) -> str:
    """Resolve the path of a file or folder, which need not exist yet. `path_problems` reports paths left unchanged."""
    expanded = os.path.expanduser(text)
    return text if not text or expanded.startswith("~") else os.path.abspath(folder / expanded)


def _folder_or_name(text: str, folder: Path) -> str:
    """Resolve a model, a tokenizer or a data set: a name of the hub, or the path of a file or folder."""
    if text.startswith(_OTHER_NAMES) or "://" in text:
        return text
    if _HUB_NAME.fullmatch(text):
        folders = [place for place in (folder, Path()) if os.path.exists(place / text)]
        return _file(text, folders[0]) if folders else text
    return _file(text, folder)


def data_suffix(name: str | Path) -> str:
    """Return the suffix of a data file's format, `.jsonl` for `rows.jsonl.gz`; an empty string for other files."""
    path = Path(name)
    if path.suffix.lower() in COMPRESSED:
        return suffix if (suffix := Path(path.stem).suffix.lower()) in TEXT_SUFFIXES else ""
    return suffix if (suffix := path.suffix.lower()) in DATA_SUFFIXES else ""


def _data(text: str, folder: Path) -> str:
    """Resolve a data source, like a model; a name with a suffix of a data file is a path."""
    return _file(text, folder) if data_suffix(text) and "://" not in text else _folder_or_name(text, folder)


def _function(text: str, folder: Path) -> str:
    """Resolve `path/file.py:name` or `model:PATH`; other names are not changed."""
    if match := _FUNCTION_IN_FILE.fullmatch(text):
        return _file(match[1], folder) + match[2]
    if text.startswith(_REWARD_MODEL):
        return _REWARD_MODEL + _folder_or_name(text.removeprefix(_REWARD_MODEL), folder)
    return text


def _content(text: str, folder: Path) -> str:
    """Resolve the path of a file for an agent; a column of the row, `{NAME}`, is not changed."""
    return text if _COLUMN.fullmatch(text) else _file(text, folder)


def shipped_folder(name: str) -> Path:
    """Return the folder `configs` or `launch` shipped with megagrpo: inside the package, or beside it in a checkout."""
    inside, beside = (folder / name for folder in Path(__file__).parents[2:4])
    return beside if beside.is_dir() and not inside.is_dir() else inside


def _template(text: str, folder: Path) -> str:
    """Resolve the path of a chat template, or `megagrpo:templates/FILE`; Jinja text and `none` are not changed."""
    if text.startswith(SHIPPED):
        return str(shipped_folder("configs") / text.removeprefix(SHIPPED))
    return text if "{{" in text or "{%" in text or text == _PLAIN_TEXT else _file(text, folder)


PATHS: dict[str, Resolve] = {
    "run.output_dir": _file,
    "model.path": _folder_or_name,
    "model.reference_path": _folder_or_name,
    "model.tokenizer": _folder_or_name,
    "run.callbacks.*": _function,
    "run.trackers.*": _function,
    "algorithm.loss_type": _function,
    "algorithm.teacher.path": _folder_or_name,
    "algorithm.teacher.*.path": _folder_or_name,
    "algorithm.advantage_estimator": _function,
    "train.optimizer": _function,
    "train.lr_scheduler_type": _function,
    "lora.adapter_path": _file,
    "data.source": _function,
    "data.train.source": _data,
    "data.eval.source": _data,
    "evaluation.sets.*.source": _data,
    "data.chat_template": _template,
    "rewards.functions.*.function": _function,
    "multi_turn.scheduler": _function,
    "multi_turn.tools.*": _function,
    "multi_turn.environment": _function,
    "multi_turn.agent": _function,
    "multi_turn.agent.function": _function,
    "multi_turn.agent.files.*": _content,
    "multi_turn.agent.score_files.*": _content,
    "multi_turn.agent.certificate": _file,
    "multi_turn.agent.certificate_key": _file,
    "rollout.urls_file": _file,
    "rollout.kept.path": _file,
    "rollout.weight_sync_transport": _function,
    "rollout.token_file": _file,
}
