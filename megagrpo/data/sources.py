"""Reads data sets from files, folders, the hub and reasoning-gym as sequences of rows (dicts)."""

from __future__ import annotations

import codecs
import dataclasses
import difflib
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets

from megagrpo.config import DatasetSection
from megagrpo.data.text_rows import JsonLines, csv_columns, json_rows

datasets.disable_progress_bars()  # every rank would print one for copying a small file into the cache

GYM_PREFIX = "reasoning_gym:"
_JSON = {".jsonl": JsonLines, ".json": json_rows}
_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_rows(section: DatasetSection, key: str, seed: int, prompt_column: str) -> Sequence[dict[str, Any]]:
    """Return the rows of a data set, at most `section.size`. `key` is the section's config key, for messages.

    Rows of reasoning-gym have `question`, `answer`, `metadata`, and the question again in `prompt_column`. They are generated from `seed`
    unless `options` contains a seed. Raises ValueError for a source that does not exist, cannot be read or has no rows.
    """
    if section.source.startswith(GYM_PREFIX):
        rows: Sequence[dict[str, Any]] = _generate(section, key, seed, prompt_column)
    else:
        if section.options:
            raise ValueError(f"{key}.options: only {GYM_PREFIX}FAMILY has options; remove {', '.join(section.options)}")
        rows = _read(section, key)
    if len(rows) == 0:
        raise ValueError(f"{key}.source: {section.source} (split {section.split}) has no rows; name another source or split")
    return rows


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean `x`?` with the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else ""


def _read(section: DatasetSection, key: str) -> datasets.Dataset | JsonLines:
    path = _find(section.source, key)
    if path is not None and path.is_file() and path.suffix != ".parquet":
        _check_utf8(path, key)
    try:
        if path is None:
            data = datasets.load_dataset(section.source, section.subset, split=section.split)
        elif path.suffix in _JSON and path.is_file():
            data = _slice(_JSON[path.suffix](path.read_bytes()), section.split)
        elif path.is_file():
            files = {_split_name(section.split): str(path)}  # a file has one split, whatever it is called
            options = _csv_options(path) if path.suffix == ".csv" else {}
            data = datasets.load_dataset(_FORMATS[path.suffix], data_files=files, split=section.split, **options)
        elif (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            data = _split_saved(datasets.load_from_disk(str(path)), section.split)
        else:
            data = datasets.load_dataset(str(path), section.subset, split=section.split)
    except Exception as error:  # pyarrow, the hub and file systems raise errors without a common base class
        where = f"{path}" if path else f"{section.source} is not a local file or folder, and as a hub data set it"
        cause: BaseException = error
        while path is not None and cause.__cause__ is not None:  # `datasets` hides what is wrong with a file
            cause = cause.__cause__
        said = str(cause) if type(cause) is ValueError else f"{type(cause).__name__}: {cause}"
        raise ValueError(f"{key}.source: {where} cannot be loaded: {said}") from error
    return data if section.size is None else data.select(range(min(section.size, len(data))))


def _check_utf8(path: Path, key: str) -> None:
    """Raise ValueError for a text file that is not UTF-8. The library's error would come later and not name the file."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while chunk := file.read(2**24):
                decoder.decode(chunk)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}.source: {path} is not UTF-8 text ({error.reason}); save it in UTF-8") from None


def _find(source: str, key: str) -> Path | None:
    """Return the path of a file or folder; None if the name can only be a hub data set. Raises ValueError for a path that does not
    exist."""
    if "://" in source:
        raise ValueError(f"{key}.source: {source} is an address; download the file and name its path, or name a data set of the hub")
    path = Path(os.path.expanduser(source))
    if path.is_dir() or (path.is_file() and path.suffix in _FORMATS):
        return path.resolve()
    if path.is_file():
        raise ValueError(f"{key}.source: {path} must end in one of {', '.join(_FORMATS)}; convert or rename the file")
    if path.suffix in _FORMATS or path.is_absolute() or source.startswith(".") or source.count("/") > 1:
        raise ValueError(f"{key}.source: no file or folder {path.absolute()}; correct the path")
    return None


def _split_name(split: str) -> str:
    """The name in a split such as `train[:100]`."""
    return re.sub(r"(?s)\W.*", "", split)


def _split_saved(data: datasets.Dataset | datasets.DatasetDict, split: str) -> datasets.Dataset:
    """Return a split, or a slice such as `train[:100]`, of a data set from `save_to_disk`. A saved single Dataset accepts any split
    name."""
    name = _split_name(split)
    if isinstance(data, datasets.DatasetDict):
        if name not in data:
            raise ValueError(f"it has no split `{name}`; it has {', '.join(data)}")
        data = data[name]
    return _slice(data, split)


def _slice[Rows: (datasets.Dataset, JsonLines)](data: Rows, split: str) -> Rows:
    """Return the rows that a split such as `train[:100]` names."""
    pieces = datasets.ReadInstruction.from_spec(split).to_absolute({_split_name(split): len(data)})
    return data.select([i for p in pieces for i in range(p.from_ or 0, len(data) if p.to is None else p.to)])


def _csv_options(path: Path) -> dict[str, Any]:
    """Return options of `datasets` that read every cell of a csv file as text: a csv file does not say what is a number."""
    names = csv_columns(path)
    return {"features": datasets.Features({name: datasets.Value("string") for name in names}), "keep_default_na": False}


def _generate(section: DatasetSection, key: str, seed: int, prompt_column: str) -> list[dict[str, Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # raised in cellpylib, which reasoning-gym imports
            from reasoning_gym.factory import DATASETS, create_dataset  # imported late, because it takes seconds
    except ImportError as error:
        raise ValueError(f"{key}.source: {section.source} needs the package reasoning-gym; run `megagrpo install data`: {error}") from error

    family = section.source.removeprefix(GYM_PREFIX)
    if family not in DATASETS:
        raise ValueError(f"{key}.source: reasoning-gym has no family `{family}`{did_you_mean(family, DATASETS)}")
    names = [field.name for field in dataclasses.fields(DATASETS[family][1])]
    for option in section.options:
        if option not in names:
            hint = did_you_mean(option, names)
            raise ValueError(f"{key}.options.{option}: `{family}` has no such option{hint}; it has {', '.join(names)}")
    size = {} if section.size is None else {"size": section.size}
    try:
        entries = list(create_dataset(family, **{"seed": seed, **section.options, **size}))
    except (AssertionError, ValueError, TypeError) as error:
        raise ValueError(f"{key}.options: reasoning-gym's `{family}` rejects {section.options}: {error}; correct the options") from error
    return [{**entry, prompt_column: entry["question"]} for entry in entries]
