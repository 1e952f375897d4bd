"""Checks files on this machine: the tokenizer, the data, the run's folder.

Files elsewhere, for example on a hub, are checked by the run.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from megagrpo.config import DataSection, DatasetSection, EvaluationSet, Problem
from megagrpo.config.basics.paths import data_suffix
from megagrpo.data.sources.text_rows import ROWS_FOR_NAMES, column_hint, names_in
from megagrpo.data.tokens.chat_templates import missing_template
from megagrpo.regular_files import open_regular, read_regular

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 3500  # limits of Linux in bytes, minus room for the file names that a run adds


def output_problems(output_dir: str) -> list[Problem]:
    """Return the problem of an output folder that cannot be created or written to."""
    folder, key = Path(output_dir), ("run.output_dir",)
    there = next((path for path in (folder, *folder.absolute().parents) if os.path.lexists(path)), Path("/"))
    if longest := [part for part in folder.parts if len(part.encode()) > MAX_NAME_BYTES]:
        size = len(longest[0].encode())
        why = f"{longest[0][:50]}... has {size} bytes; the limit for a file name is {MAX_NAME_BYTES}"
    elif len(str(folder.absolute()).encode()) > MAX_PATH_BYTES:
        why = f"{str(folder)[:50]}... is longer than {MAX_PATH_BYTES} bytes"
    elif not there.is_dir():
        why = f"{folder}: {there} is not a folder"
    elif not os.access(there, os.W_OK):
        why = f"{folder}: {there} cannot be written to"
    else:
        return []
    return [Problem(key, f"{why}; name another folder")]


def data_problems(data: DataSection, held_out: Mapping[str, EvaluationSet], with_columns: bool = True) -> list[Problem]:
    """Return missing data files and chat templates, and columns that the first row of a jsonl or csv file lacks."""
    problems = []
    sources: list[tuple[str, DatasetSection]] = [("data.train", data.train)]
    sources += [] if data.eval is None else [("data.eval", data.eval)]
    sources += [(f"evaluation.sets.{name}", section) for name, section in held_out.items()]
    for key, section in sources:
        path = Path(os.path.expanduser(section.source))
        is_path = bool(data_suffix(path)) or path.is_absolute() or section.source.startswith(".")
        if is_path and not os.path.exists(path):
            said = f"no file or folder {path.absolute()}; correct the path"
            problems.append(Problem((f"{key}.source",), said))
        elif with_columns and (present := _columns(path)):
            problems += _column_problems(data, key, section, present)
    template = data.chat_template
    if template is not None and Path(template).is_absolute() and "\n" not in template and not os.path.isfile(template):
        problems.append(Problem(("data.chat_template",), missing_template(template)))
    return problems


def _column_problems(data: DataSection, key: str, section: DatasetSection, present: list[str]) -> list[Problem]:
    """Return columns that the data set's keys name but its rows lack. Evaluation sets may override keys of `data`."""
    own = {name: getattr(section, name, None) for name in ("prompt_column", "columns", "extract_hash_answer")}
    named = {
        name: (f"data.{name}", getattr(data, name)) if value is None else (f"{key}.{name}", value)
        for name, value in own.items()
    }
    renamed_key, renamed = named["columns"]
    hash_key, hash_columns = named["extract_hash_answer"]
    required = [named["prompt_column"], *((f"{renamed_key}.{new}", old) for new, old in renamed.items())]
    required += [(hash_key, name) for name in hash_columns if name not in renamed]
    has = f"{section.source} has columns {', '.join(present)}"
    return [
        Problem((where, f"{key}.source"), f"no column `{name}`{column_hint(name, present)}; {has}")
        for where, name in required
        if name not in present
    ]


def _columns(path: Path) -> list[str]:
    """Return the column names of a jsonl or csv file, from its first rows, fields of objects included; empty for other
    sources and unreadable files."""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as lines:
            if path.suffix == ".jsonl":
                rows = [json.loads(line) for line in islice(filter(str.strip, lines), ROWS_FOR_NAMES)]
                return list(dict.fromkeys(name for row in rows for name in names_in(row)))
            return next(csv.reader(lines), []) if path.suffix == ".csv" else []
    except (OSError, ValueError, AttributeError, csv.Error):  # AttributeError: a row that is no object
        return []


def tokenizer_problems(path: str, data: DataSection, vocab_size: int) -> list[Problem]:
    """Return problems of a tokenizer in a local folder `path`, for a model with `vocab_size` tokens."""
    folder = Path(os.path.expanduser(path))
    settings = read_object(folder / "tokenizer_config.json")
    if not settings:
        return []
    problems, tokens = _code_problems(folder, settings), read_object(folder / "tokenizer.json")
    vocabulary, added = tokens.get("model"), tokens.get("added_tokens")
    vocabulary = vocabulary.get("vocab") if isinstance(vocabulary, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    ids = [number for number in ids if isinstance(number, int)]
    if ids and max(ids) >= vocab_size:
        said = f"token {max(ids)} of {folder} is outside of the model's vocab_size {vocab_size}; name the"
        problems.append(Problem(("model.tokenizer", "model.path"), f"{said} model's own tokenizer"))
    problems += _end_token_problems(folder, vocab_size)
    return problems + _template_problems(data, folder, settings.get("chat_template"))


def _code_problems(folder: Path, settings: dict[str, Any]) -> list[Problem]:
    """Return the problem of a tokenizer that exists as code only; empty without it. transformers may know its class."""
    code = settings.get("auto_map")
    if not isinstance(code, dict) or "AutoTokenizer" not in code or (folder / "tokenizer.json").exists():
        return []
    from megagrpo.data.tokens.tokenizer import load_tokenizer

    try:
        load_tokenizer(folder)
    except ValueError as error:
        key, _, said = str(error).partition(": ")
        return [Problem((key,), said)]
    return []


def _template_problems(data: DataSection, folder: Path, template: Any) -> list[Problem]:
    """Return the first variable of `data.chat_template_kwargs` that the chat template does not use. `template` is the
    text in tokenizer_config.json, if any."""
    kwargs, file = data.chat_template_kwargs, folder / "chat_template.jinja"
    if not kwargs or isinstance(template, list):  # a list has several named templates
        return []
    from megagrpo.data.tokens.chat_templates import check_kwargs, read_chat_template

    try:
        check_kwargs(kwargs, read_chat_template(data.chat_template or (str(file) if file.exists() else template)))
    except ValueError as error:
        key, _, said = str(error).partition(": ")
        return [Problem((key,), said)] if key == "data.chat_template_kwargs" else []
    return []


def _end_token_problems(folder: Path, vocab_size: int) -> list[Problem]:
    """Return the problem of an unreadable generation_config.json, or of unknown end tokens in it; empty without it."""
    path, key = folder / "generation_config.json", ("model.path",)
    said = ""
    try:
        content = json.loads(read_regular(path).decode())
        ends = content.get("eos_token_id")
        ends = [] if ends is None else as_list(ends)
        if odd := [end for end in ends if type(end) is not int or not 0 <= end < vocab_size]:
            said = f"eos_token_id {odd[0]!r} in {path} is not a token of the model (vocab_size {vocab_size}); use an id"
            said += " below that"
    except FileNotFoundError:
        pass
    except AttributeError:
        said = f"{path} must contain a JSON object; download it again, or delete it"
    except (OSError, ValueError, RecursionError) as error:
        said = f"{path} is not valid JSON: {error}; download it again, or delete it"
    return [Problem(key, said)] if said else []


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty when it cannot be read."""
    try:
        content = json.loads(read_regular(path).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a list unchanged, and another value as a list of it."""
    return value if isinstance(value, list) else [value]
