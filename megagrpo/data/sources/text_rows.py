"""Rows whose values are what their file says, and the names of their columns."""

from __future__ import annotations

import copy
import json
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, overload

from megagrpo.suggestions import did_you_mean

Row = dict[str, Any]
ANSWERS = ("answer", "solution", "ground_truth", "target", "label")  # usual names of the column with the right answer
ROWS_FOR_NAMES = 64  # rows that names of columns and fields are taken from; a later row may lack some
SHAREGPT = "conversations"  # the column of messages in ShareGPT's rows


class JsonRows(Sequence[Row]):
    """Rows that are kept as JSON text, so that each value is what its file says.

    A row has every column that some row has, None where the row itself does not have it. Memory holds the text, and a
    row is parsed when it is used. The constructor takes pairs of a row as JSON and its columns.
    """

    def __init__(self, lines: Iterable[tuple[bytes, Iterable[str]]]):
        columns: dict[str, None] = {}
        self._text, self._spans = bytearray(), array("Q")  # where a row begins and ends, in turns
        for line, names in lines:
            self._spans.extend((len(self._text), len(self._text) + len(line)))
            self._text += line
            columns |= dict.fromkeys(names)
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
        row = json.loads(self._text[self._spans[2 * index] : self._spans[2 * index + 1]])
        return {name: row.get(name) for name in self._columns}

    def select(self, indices: Iterable[int]) -> JsonRows:
        """Return the rows with these numbers."""
        chosen = copy.copy(self)
        chosen._spans = array("Q", [place for i in indices for place in self._spans[2 * i : 2 * i + 2]])
        return chosen


def nested(row: Row, name: str) -> Any:
    """Return a column's value, or an object field's, as `reward_model.ground_truth`. Raises KeyError without it."""
    if name in row or "." not in name:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict):
            raise KeyError(name)
        value = value[part]
    return value


def column_hint(name: str, present: Sequence[str]) -> str:
    """Return the end of a message on a missing column: the nearest name, or where other trainers' rows hold it."""
    if hint := did_you_mean(name, present):
        return hint
    fields = [other for other in present if "." in other and other.rpartition(".")[2] in ANSWERS]
    if name in ANSWERS and fields:
        return f"; did you mean `{fields[0]}`?"
    if SHAREGPT in present:
        return (
            f"; `{SHAREGPT}` is ShareGPT's: rename it, `from` to role and `value` to content, and end with the user's "
            "message"
        )
    return ""


def names_in(row: Row) -> list[str]:
    """Return the names of a row's columns, and of the fields in its columns of objects."""
    fields = [f"{name}.{field}" for name, value in row.items() if isinstance(value, dict) for field in value]
    return [*row, *fields]
