"""Reads data sets from files, folders, the hub and reasoning-gym as sequences of rows (dicts)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
from pyarrow import types

from megagrpo.config import DatasetSection
from megagrpo.config.basics.paths import DATA_SUFFIXES, TEXT_SUFFIXES, data_suffix
from megagrpo.data.sources.bad_rows import BadRows
from megagrpo.data.sources.text_files import Line, read_lines, why_empty, wrong_kind
from megagrpo.data.sources.text_rows import JsonRows
from megagrpo.regular_files import NotRegular, irregular_entry, read_regular
from megagrpo.suggestions import did_you_mean

datasets.disable_progress_bars()  # every rank would print one for copying a small file into the cache

GYM_PREFIX = "reasoning_gym:"


class SourceError(ValueError):
    """A data set that cannot be used. The message names the key and the fix."""


@dataclasses.dataclass(frozen=True)
class _TextReader:
    """Reads text files of the data set of a config key. `bad` gets lines that are no rows."""

    key: str
    prompt_column: str
    bad: BadRows

    def lines(self, file: Path) -> Iterator[Line]:
        """Yield the rows of a text file. Raises SourceError."""

        def add(error: Exception) -> None:
            self.bad.add(self._of(file, error) if self.bad.skips else error)

        try:
            yield from read_lines(file, self.prompt_column, add)
        except (ValueError, OSError, EOFError, zlib.error) as error:  # the last three: a damaged compressed file
            raise self._of(file, error) from error

    def _of(self, file: Path, error: Exception) -> SourceError:
        if isinstance(error, UnicodeDecodeError):
            return SourceError(f"{self.key}.source: {file} is not UTF-8 text ({error.reason}); save it in UTF-8")
        return SourceError(f"{self.key}.source: {file} cannot be loaded: {_cause(error, True)}")


def load_rows(
    section: DatasetSection, key: str, seed: int, prompt_column: str, bad: BadRows | None = None
) -> Sequence[dict[str, Any]]:
    """Return the rows of a data set, at most `section.size`. `key` is the section's config key, for messages. `bad`
    gets lines that are no rows; None refuses them.

    docs/your_own_task.md lists the types of values by format. Rows of reasoning-gym have `question`, `answer`,
    `metadata`, and the question again in `prompt_column`. They are generated from `seed` unless `options` contains a
    seed. Raises ValueError for a source that does not exist, cannot be read, or has no rows or no columns.
    """
    if section.source.startswith(GYM_PREFIX):
        rows: Sequence[dict[str, Any]] = _generate(section, key, seed, prompt_column)
    else:
        if section.options:
            raise ValueError(f"{key}.options: only {GYM_PREFIX}FAMILY has options; remove {', '.join(section.options)}")
        rows = _read(section, key, _TextReader(key, prompt_column, bad or BadRows()))
    if len(rows) == 0:
        raise ValueError(
            f"{key}.source: {section.source} (split {section.split}) has no rows; name another source or split"
        )
    if not (rows.column_names if isinstance(rows, datasets.Dataset) else rows[0]):  # a row's images would be decoded
        raise ValueError(
            f'{key}.source: the rows of {section.source} have no columns; write rows such as {{"{prompt_column}": '
            f'"..."}}'
        )
    return rows


def _read(section: DatasetSection, key: str, reader: _TextReader) -> datasets.Dataset | JsonRows:
    path = _find(section.source, key)
    try:
        if path is not None and path.is_file():
            one = {_split_name(section.split): [path]}  # a file has one split, whatever it is called
            data = _read_files(one, section.split, key, reader)
        elif path is not None and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
            data = _read_saved(path, section.split)
        else:
            data = _read_folder(str(path or section.source), section, key, reader)
    except SourceError:
        raise
    except Exception as error:  # pyarrow, the hub and file systems raise errors without a common base class
        where = f"{path}" if path else f"{section.source} is not a local file or folder, and as a hub data set it"
        raise SourceError(f"{key}.source: {where} cannot be loaded: {_cause(error, path is not None)}") from error
    return data if section.size is None else data.select(range(min(section.size, len(data))))


def _cause(error: BaseException, local: bool) -> str:
    while local and error.__cause__ is not None:  # `datasets` hides what is wrong with a file
        error = error.__cause__
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _read_folder(source: str, section: DatasetSection, key: str, reader: _TextReader) -> datasets.Dataset | JsonRows:
    """Return the rows of a folder or a hub data set. `datasets` finds the files of each split; text files are read
    here, without guesses of types."""
    builder, source = _builder(source, section.subset)
    listed = {str(name): list(files) for name, files in (builder.config.data_files or {}).items()}
    names = list(dict.fromkeys(map(_split_name, section.split.split("+"))))
    if missing := [name for name in names if listed and name not in listed]:
        raise ValueError(f"it has no split `{missing[0]}`; it has {', '.join(listed)}")
    splits = {
        name: [Path(file) for file in datasets.DownloadManager().download(listed[name])] for name in names if listed
    }
    if splits and all(data_suffix(file) for files in splits.values() for file in files):
        return _read_files(splits, section.split, key, reader)
    return datasets.load_dataset(source, section.subset, split=section.split)


def _builder(source: str, subset: str | None) -> tuple[datasets.DatasetBuilder, str]:
    """Return what `datasets` knows of a folder or hub data set, and the source: the hub's cache when offline."""
    cached = None
    if not os.path.isdir(source):
        with contextlib.suppress(
            huggingface_hub.errors.LocalEntryNotFoundError, huggingface_hub.errors.HFValidationError
        ):
            cached = huggingface_hub.snapshot_download(source, repo_type="dataset", local_files_only=True)
    try:
        if cached is None or not huggingface_hub.constants.HF_HUB_OFFLINE:
            return datasets.load_dataset_builder(source, subset), source
    except (datasets.exceptions.DataFilesNotFoundError, datasets.data_files.EmptyDatasetError):
        raise ValueError(f"it has no data files; put files that end in {', '.join(DATA_SUFFIXES)} there") from None
    except Exception:  # errors of the HTTP library, which is not the same in every version
        if cached is None:
            raise
    return datasets.load_dataset_builder(cached, subset), cached


def _read_files(
    splits: dict[str, list[Path]], split: str, key: str, reader: _TextReader
) -> datasets.Dataset | JsonRows:
    """Return the rows that `split` names. `splits` maps names of splits to files in order; all have one format."""
    files = [file for listed in splits.values() for file in listed]
    for file in files:
        _check_file(file, key)
    lengths = dict.fromkeys(splits, 0)

    def lines() -> Iterator[Line]:
        for name, listed in splits.items():
            for file in listed:
                for line in reader.lines(file):
                    lengths[name] += 1
                    yield line

    if data_suffix(files[0]) in TEXT_SUFFIXES:
        rows: datasets.Dataset | JsonRows = JsonRows(lines())
    elif filled := {
        name: held for name, listed in splits.items() if (held := [str(file) for file in listed if _has_rows(file)])
    }:
        schema = common_schema([Path(file) for held in filled.values() for file in held])
        features = None if schema is None else datasets.Features.from_arrow_schema(schema)
        found = datasets.load_dataset(data_suffix(files[0]).removeprefix("."), data_files=filled, features=features)
        lengths |= {name: len(found[name]) for name in filled}
        rows = datasets.concatenate_datasets([found[name] for name in filled])
    else:
        rows = JsonRows(())
    if len(rows) == 0 and reader.bad.count:
        raise SourceError(f"{key}.source: all {reader.bad.count} rows of {files[0]} are bad; {reader.bad.first}")
    if len(rows) == 0:
        raise SourceError(f"{key}.source: {files[0]} {why_empty(files[0])}; name a file with rows")
    return _slice(rows, split, lengths)


def _has_rows(file: Path) -> bool:
    """Whether a parquet file has rows, which `datasets` needs; True for an arrow file with any content."""
    return file.stat().st_size > 0 and (
        data_suffix(file) != ".parquet" or pyarrow.parquet.read_metadata(file).num_rows > 0
    )


def _check_file(file: Path, key: str) -> None:
    """Raise SourceError for a file that is not what its name says, and for parquet columns that rows cannot have."""
    if wrong := wrong_kind(file):
        raise SourceError(f"{key}.source: {file} {wrong}")
    if data_suffix(file) == ".parquet" and file.stat().st_size:
        schema = pyarrow.parquet.read_schema(file)
        for field in schema:
            if schema.names.count(field.name) > 1:
                raise SourceError(f"{key}.source: {file} has the column `{field.name}` twice; rename one")
            if "map<" in str(field.type):
                raise SourceError(
                    f"{key}.source: {file}: column `{field.name}` holds maps, which no row can hold; store structs or "
                    "lists"
                )


def _find(source: str, key: str) -> Path | None:
    """Return a file's or folder's path; None for what can only be a hub name. Raises ValueError for a missing path."""
    if "://" in source:
        raise ValueError(
            f"{key}.source: {source} is an address; download the file and name its path, or name a data set of the hub"
        )
    path = Path(os.path.expanduser(source))
    if path.is_dir() or (path.is_file() and data_suffix(path)):
        return path.resolve()
    if path.is_file():
        raise ValueError(
            f"{key}.source: {path} must end in one of {', '.join(DATA_SUFFIXES)}; convert or rename the file"
        )
    if path.exists():
        raise ValueError(f"{key}.source: {path.absolute()} is no regular file; copy its content into a file")
    if data_suffix(path) or path.is_absolute() or source.startswith(".") or source.count("/") > 1:
        raise ValueError(f"{key}.source: no file or folder {path.absolute()}; correct the path")
    return None


def _split_name(split: str) -> str:
    """The name in a split such as `train[:100]`."""
    return re.sub(r"(?s)[^\w.].*", "", split.strip())


def _read_saved(path: Path, split: str) -> datasets.Dataset:
    """Return a split or slice such as `train[:100]` of a `save_to_disk` folder. A Dataset accepts any split name."""
    name = _split_name(split)
    if (path / "dataset_dict.json").exists():
        names = json.loads(read_regular(path / "dataset_dict.json"))["splits"]
        if name not in names:
            raise ValueError(f"it has no split `{name}`; it has {', '.join(names)}")
        path = path / name
    if odd := irregular_entry(path):
        raise NotRegular(odd)
    try:
        data = datasets.load_from_disk(str(path))
    except IndexError:  # the library's error for a data set without files
        raise ValueError("it has no rows; name another folder or split") from None
    return _slice(data, split, {name: len(data)})


def _slice[Rows: (datasets.Dataset, JsonRows)](data: Rows, split: str, lengths: Mapping[str, int]) -> Rows:
    """Return the rows that a split such as `train[:100]+test` names. `data` holds splits of these lengths, in order."""
    begins = dict(zip(lengths, itertools.accumulate(lengths.values(), initial=0), strict=False))
    pieces = datasets.ReadInstruction.from_spec(split).to_absolute(dict(lengths))
    ends = [
        (begins[p.splitname] + (p.from_ or 0), begins[p.splitname] + (lengths[p.splitname] if p.to is None else p.to))
        for p in pieces
    ]
    return data.select([i for begin, end in ends for i in range(begin, end)])


def _generate(section: DatasetSection, key: str, seed: int, prompt_column: str) -> list[dict[str, Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # raised in cellpylib, which reasoning-gym imports
            from reasoning_gym.factory import DATASETS, create_dataset  # imported late, because it takes seconds
    except ImportError as error:
        raise ValueError(
            f"{key}.source: {section.source} needs the package reasoning-gym; run `megagrpo install data`: {error}"
        ) from error

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
        raise ValueError(
            f"{key}.options: reasoning-gym's `{family}` rejects {section.options}: {error}; correct the options"
        ) from error
    return [{**entry, prompt_column: entry["question"]} for entry in entries]


def common_schema(files: Sequence[Path]) -> pyarrow.Schema | None:
    """Return the schema that holds the rows of all parquet or arrow files exactly; None if all have the same types.

    A null column takes another file's type. Integers, floats, texts and lists take the wider type, and objects have the
    fields of all files. Raises ValueError with
    the column, both files and both types for other differences. Columns that a file lacks are not compared.
    """
    first = schema_of(files[0])
    chosen = {field.name: (field.type, files[0]) for field in first}
    for file in files[1:]:
        for field in schema_of(file):
            kind, origin = chosen.get(field.name, (field.type, file))
            common = _common(kind, field.type)
            if common is None:
                both = f"{kind} in {origin} and {field.type} in {file}"
                raise ValueError(f"column `{field.name}` is {both}; store one type in all files")
            chosen[field.name] = common, file if types.is_null(kind) else origin
    fields = [field.with_type(chosen[field.name][0]) for field in first]
    return None if fields == list(first) else pyarrow.schema(fields, first.metadata)


def schema_of(file: Path) -> pyarrow.Schema:
    """Return the columns and types of a parquet or arrow file."""
    if file.suffix.lower() == ".parquet":
        return pyarrow.parquet.read_schema(file)
    with pyarrow.memory_map(str(file)) as source:
        try:
            return pyarrow.ipc.open_stream(source).schema
        except pyarrow.ArrowInvalid:
            return pyarrow.ipc.open_file(source).schema


def _common(one: pyarrow.DataType, other: pyarrow.DataType) -> pyarrow.DataType | None:
    """Return the type that holds the values of both exactly; None if there is none."""
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    fields = [pyarrow.schema([("", kind.value_type if types.is_dictionary(kind) else kind)]) for kind in (one, other)]
    try:
        common = pyarrow.unify_schemas(fields, promote_options="permissive").field(0).type
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return None
    return common if all(_holds(common, schema.field(0).type) for schema in fields) else None


def _holds(wide: pyarrow.DataType, kind: pyarrow.DataType) -> bool:
    """Whether a type has every value of another one, and Python the same values."""
    if wide == kind or types.is_null(kind):
        return True
    if types.is_integer(wide) and types.is_integer(kind):
        is_signed = types.is_signed_integer(wide), types.is_signed_integer(kind)
        return wide.bit_width > kind.bit_width and (is_signed[0] or not is_signed[1])
    if types.is_list(kind) or types.is_large_list(kind):
        return (types.is_list(wide) or types.is_large_list(wide)) and _holds(wide.value_type, kind.value_type)
    if types.is_struct(wide) and types.is_struct(kind):
        inner = {field.name: field.type for field in wide}
        return all(field.name in inner and _holds(inner[field.name], field.type) for field in kind)
    kinds = (types.is_floating, lambda t: types.is_string(t) or types.is_large_string(t))
    return any(is_kind(wide) and is_kind(kind) for is_kind in kinds) or (
        types.is_large_binary(wide) and types.is_binary(kind)
    )
