"""Reads jsonl, json and csv files as rows whose values are what the file says: no text becomes a date, no integer is rounded."""

from __future__ import annotations

import codecs
import copy
import csv
import difflib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

Row = dict[str, Any]
ANSWERS = ("answer", "solution", "ground_truth", "target", "label")  # usual names of the column with the right answer
SHAREGPT = "conversations"  # the column of messages in ShareGPT's rows


class JsonLines(Sequence[Row]):
    """The rows of a jsonl file. A row has every column that some row has, None where the row itself does not have it.

    Memory holds the file's bytes, and a row is parsed when it is used. The constructor parses every line once. Raises ValueError, with the
    line, for a line that is not a JSON object.
    """

    def __init__(self, content: bytes):
        columns: dict[str, None] = {}
        self._bytes, self._spans = content, array("Q")  # where a row begins and ends, in turns
        begin = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
        for number, line in enumerate(_lines(content, begin), start=1):
            first, end = line
            if content[first:end].strip():
                columns |= dict.fromkeys(_object(content[first:end], f"line {number}"))
                self._spans.extend(line)
        self._columns = list(columns)

    def __len__(self) -> int:
        return len(self._spans) // 2

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        index = range(len(self))[index]  # IndexError beyond the end, which also ends an iteration
        row = json.loads(self._bytes[self._spans[2 * index] : self._spans[2 * index + 1]])
        return {name: row.get(name) for name in self._columns}

    def select(self, indices: Iterable[int]) -> JsonLines:
        """Return the rows with these numbers."""
        chosen = copy.copy(self)
        chosen._spans = array("Q", [place for i in indices for place in self._spans[2 * i : 2 * i + 2]])
        return chosen


def _lines(content: bytes, begin: int) -> Iterator[tuple[int, int]]:
    """Yield where each line begins and ends."""
    while begin < len(content):
        end = content.find(b"\n", begin)
        end = len(content) if end < 0 else end
        yield begin, end
        begin = end + 1


def json_rows(content: bytes) -> JsonLines:
    """Return the rows of a json file: a list of objects, or lines as in a jsonl file. Raises ValueError, with the line."""
    text = content.decode("utf-8-sig")
    if not text.lstrip().startswith("["):
        return JsonLines(content)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno} is not valid JSON: {error.msg}; correct it") from None
    if wrong := [i for i, row in enumerate(rows) if not isinstance(row, dict)]:
        raise ValueError(f"element {wrong[0]} of the list must be an object of columns; correct it")
    return JsonLines("\n".join(map(json.dumps, rows)).encode())


def csv_columns(file: Path) -> list[str]:
    """Return the names in the first line of a csv file. Raises ValueError for a name that occurs twice, and csv.Error."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        names = next(csv.reader(lines), [])
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"line 1 names the column `{twice[0]}` twice; rename one")
    return names


def _object(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}, column {error.colno} is not valid JSON: {error.msg}; correct the line") from None
    except (ValueError, RecursionError) as error:  # an integer of more than 4,300 digits, or 1,000 nested lists
        raise ValueError(f"{where} cannot be read: {error}; correct the line") from None
    if not isinstance(row, dict):
        raise ValueError(f'{where} must be an object of columns, as {{"prompt": ...}} (got a {type(row).__name__}); correct the line')
    return row


def nested(row: Row, name: str) -> Any:
    """Return the value of a column, or of a field in a column of objects, as `reward_model.ground_truth`. Raises KeyError without it."""
    if name in row or "." not in name:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict):
            raise KeyError(name)
        value = value[part]
    return value


def column_hint(name: str, present: Sequence[str]) -> str:
    """Return how to name a column that is missing, as the end of a message: the nearest name, or where other trainers' rows hold it."""
    if near := difflib.get_close_matches(name, present, n=1, cutoff=0.5):
        return f"; did you mean `{near[0]}`?"
    fields = [other for other in present if "." in other and other.rpartition(".")[2] in ANSWERS]
    if name in ANSWERS and fields:
        return f"; did you mean `{fields[0]}`?"
    if SHAREGPT in present:
        return f"; `{SHAREGPT}` is ShareGPT's: rename it, `from` to role and `value` to content, and end with the user's message"
    return ""


def names_in(row: Row) -> list[str]:
    """Return the names of a row's columns, and of the fields in its columns of objects."""
    fields = [f"{name}.{field}" for name, value in row.items() if isinstance(value, dict) for field in value]
    return [*row, *fields]
