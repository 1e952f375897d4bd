"""Reads jsonl, json, csv and tsv files row by row, compressed ones included, and names what is wrong with a file."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow

from megagrpo.config.basics.paths import data_suffix
from megagrpo.regular_files import open_regular

type Line = tuple[bytes, Iterable[str]]
"""A row as JSON, and the names of its columns."""
type OnBad = Callable[[Exception], None]
"""Takes the error of a line that is no row. It raises the error, or returns, and the line is skipped."""

_HEAD = 512  # bytes that tell what kind of file it is
_BEGINNINGS = {
    ".parquet": b"par1",
    ".arrow": b"arrow1",
    ".gz": b"\x1f\x8b",
    ".zst": b"\x28\xb5\x2f\xfd",
    ".bz2": b"bzh",
}
_KINDS = {  # first bytes, in lower case -> what the file is, and the fix
    b"version https://git-lfs.github.com": "is a git-lfs pointer, not the data; run `git lfs pull`",
    b"<!doctype": "is a web page, not data; download the file itself",
    b"<html": "is a web page, not data; download the file itself",
    b"<?xml": "is XML; convert it to jsonl",
    b"pk\x03\x04": "is a zip archive or an Excel file; unpack it, or export it as csv",
    b"\xff\xfe": "is not UTF-8 text (UTF-16); save it in UTF-8",
    b"\xfe\xff": "is not UTF-8 text (UTF-16); save it in UTF-8",
} | {beginning: f"is a {suffix} file; let its name end in {suffix}" for suffix, beginning in _BEGINNINGS.items()}


def wrong_kind(file: Path) -> str | None:
    """Return what a file is, and the fix, when its first bytes contradict its name; else None."""
    with open_regular(file) as stream:
        head = stream.read(_HEAD).removeprefix(codecs.BOM_UTF8).lstrip().lower()
    suffix = file.suffix.lower()
    own = _BEGINNINGS.get(suffix)
    if not head or (own and head.startswith(own)):
        return None
    if known := next((said for beginning, said in _KINDS.items() if head.startswith(beginning)), None):
        return known
    if suffix in (".csv", ".tsv") and head.startswith((b"{", b"[{")):
        return "is JSON; let its name end in .jsonl"
    # a stream of Arrow begins with a size
    return f"is no {suffix} file; rename it to what it is" if own and suffix != ".arrow" else None


def why_empty(file: Path) -> str:
    """Return what a file without rows holds, for a message."""
    if file.stat().st_size == 0:
        return "is empty (0 bytes)"
    if data_suffix(file) in (".parquet", ".arrow"):
        return "has columns, but no rows"
    with _open(file) as stream:
        text = stream.read(_HEAD).removeprefix(codecs.BOM_UTF8).strip()
    if not text:
        return "holds only white space"
    return "has a header, but no rows" if data_suffix(file) in (".csv", ".tsv") else "holds an empty list"


def read_lines(file: Path, prompt_column: str, on_bad: OnBad) -> Iterator[Line]:
    """Yield the rows of a text file. `on_bad` gets a ValueError, with the line, for what is no row, or a
    UnicodeDecodeError for other text than UTF-8. Raises them where the next row cannot be found."""
    with _open(file) as stream:
        yield from FILE_READERS[data_suffix(file)](stream, prompt_column, on_bad)


def _open(file: Path) -> BinaryIO:
    opened: dict[str, Callable[[Path], Any]] = {
        ".gz": gzip.open,
        ".bz2": bz2.open,
        ".zst": lambda path: io.BufferedReader(cast(Any, pyarrow.input_stream(str(path), compression="zstd"))),
    }
    return cast(BinaryIO, opened.get(file.suffix.lower(), open_regular)(file))


# ----------------------------------------------------------------------------------------------------------------- JSON


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text} is beyond a 64-bit float; write it as text")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(row := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"`{next(name for name in names if names.count(name) > 1)}` occurs twice in an object; rename one"
        )
    return row


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_float)
_LENIENT = json.JSONDecoder(parse_int=str, parse_float=str)  # finds where an object ends
_SPACE = re.compile(r"[ \t\r\n]*")
_OBJECT = 'must be an object of columns, as {"prompt": ...}'


def _jsonl(stream: BinaryIO, prompt_column: str, on_bad: OnBad) -> Iterator[Line]:
    for number, line in enumerate(stream, start=1):
        if number == 1 and line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):  # it is a json file
            yield from _json(cast(BinaryIO, io.BytesIO(line + stream.read())), prompt_column, on_bad)
            return
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip(" \t\r\n")
            row = _row(text, number) if text else None
        except ValueError as error:
            on_bad(error)
        else:
            if row is not None:
                yield text.encode(), row


def _row(text: str, number: int) -> dict[str, Any]:
    try:
        row = _STRICT.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"line {number}, column {error.colno} is not valid JSON: {error.msg}; correct the line"
        ) from None
    except (ValueError, RecursionError) as error:  # also an integer of more than 4,300 digits, or 1,000 nested lists
        raise ValueError(f"line {number} cannot be read: {error}; correct the line") from None
    if not isinstance(row, dict):
        raise ValueError(f"line {number} {_OBJECT} (got a {type(row).__name__}); correct the line")
    return row


def _json(stream: BinaryIO, prompt_column: str, on_bad: OnBad) -> Iterator[Line]:
    """Yield the elements of a list, consecutive objects, or the elements of an object's only list of objects."""
    text = stream.read().decode("utf-8-sig")
    begin, number = _skip(text, 0), 0
    if not text.startswith("[", begin):
        while begin < len(text):
            row, end = _object(text, begin, f"value {number}", on_bad)
            begin, number = _skip(text, end), number + 1
            if row is None:
                continue
            lists = [value for value in row.values() if _is_rows(value)]
            alone, column = number == 1 and begin == len(text), row.get(prompt_column)
            if alone and prompt_column.partition(".")[0] not in row and len(lists) == 1:
                yield from ((json.dumps(element).encode(), element) for element in lists[0])
                return
            if alone and (
                isinstance(column, dict) or (isinstance(column, list) and column and isinstance(column[0], str))
            ):
                raise ValueError(
                    "the object holds columns, not rows; save a list of rows, as pandas does with orient='records'"
                )
            yield json.dumps(row).encode(), row
        return
    begin = _skip(text, begin + 1)
    while not text.startswith("]", begin):
        if number:
            if not text.startswith(",", begin):
                raise _invalid(json.JSONDecodeError("expecting `,` or `]`", text, begin))
            begin = _skip(text, begin + 1)
        row, end = _object(text, begin, f"element {number} of the list", on_bad)
        if row is not None:
            yield text[begin:end].encode(), row
        begin, number = _skip(text, end), number + 1
    if (rest := _skip(text, begin + 1)) < len(text):
        raise _invalid(json.JSONDecodeError("text after the list", text, rest))


def _object(text: str, begin: int, what: str, on_bad: OnBad) -> tuple[dict[str, Any] | None, int]:
    """Return the object at `begin`, None for a bad one, and where it ends."""
    try:
        row, end = _STRICT.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        raise _invalid(error) from None
    except (ValueError, RecursionError) as error:
        bad = ValueError(f"{what} cannot be read: {error}; correct it")
        on_bad(bad)
        try:
            return None, _LENIENT.raw_decode(text, begin)[1]
        except RecursionError:
            raise bad from None
    if isinstance(row, dict):
        return row, end
    on_bad(ValueError(f"{what} {_OBJECT} (got a {type(row).__name__}); correct it"))
    return None, end


def _invalid(error: json.JSONDecodeError) -> ValueError:
    return ValueError(f"line {error.lineno}, column {error.colno} is not valid JSON: {error.msg}; correct it")


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(element, dict) for element in value)


def _skip(text: str, begin: int) -> int:
    """Return where the white space that begins at `begin` ends."""
    return cast(re.Match[str], _SPACE.match(text, begin)).end()


# ------------------------------------------------------------------------------------------------------------------ csv


def _csv(stream: BinaryIO, prompt_column: str, on_bad: OnBad, delimiter: str = ",") -> Iterator[Line]:
    csv.field_size_limit(sys.maxsize)  # 131,072 characters otherwise
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    names: list[str] = []
    while True:
        try:
            cells = next(reader, None)
            if cells is None:
                return
            _check_text(cells)
            if not names:
                names = _header(cells, delimiter)
            elif cells:
                if len(cells) != len(names):
                    said = f"line {reader.line_num} has {len(cells)} cells, and the header has {len(names)}"
                    raise ValueError(f"{said}; put cells that hold `{delimiter}` into double quotes")
                yield json.dumps(dict(zip(names, cells, strict=True))).encode(), names
        except (csv.Error, ValueError) as error:
            failed = error
            if isinstance(error, csv.Error):
                failed = ValueError(f"line {reader.line_num} is not valid csv: {error}; correct the line")
            if not names or "unexpected end of data" in str(error):  # the quote is open since an unknown line
                raise failed from None
            on_bad(failed)


def _header(names: list[str], delimiter: str) -> list[str]:
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"line 1 names the column `{twice[0]}` twice; rename one")
    if len(names) == 1 and (others := [other for other in ";\t|" if other in names[0] and other != delimiter]):
        raise ValueError(
            f"line 1 is one column, `{names[0]}`, separated by {others[0]!r}; save the file with {delimiter!r}"
        )
    return names


def _check_text(cells: list[str]) -> None:
    """Raise UnicodeDecodeError for cells that were no UTF-8."""
    "\n".join(cells).encode("utf-8", "surrogateescape").decode()


FILE_READERS: dict[str, Callable[[BinaryIO, str, OnBad], Iterator[Line]]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), _jsonl),
    ".json": _json,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
}
