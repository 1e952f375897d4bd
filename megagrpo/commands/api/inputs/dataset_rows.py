"""Checks data sets that are Python objects, and writes them to a file that the run reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.config import ConfigError
from megagrpo.suggestions import did_you_mean

if TYPE_CHECKING:
    import datasets
    import pandas
    import pyarrow

type Rows = datasets.Dataset | pandas.DataFrame | pyarrow.Table | Sequence[Mapping[str, Any]] | str
"""Prompts: a `datasets.Dataset`, a `pandas.DataFrame`, an Arrow table (`__arrow_c_stream__`, as of pyarrow and polars),
a list of dicts, or a source as in `data.train.source`."""

ACCEPTS = "a datasets.Dataset, a pandas.DataFrame, an Arrow table, a list of dicts, or the name of a file or a data set"


def normalize(rows: Any, argument: str) -> Any:
    """Return the rows as a `datasets.Dataset` or a list. Raises ConfigError, naming `argument`, for another kind."""
    datasets, pandas = sys.modules.get("datasets"), sys.modules.get("pandas")
    if pandas is not None and isinstance(rows, pandas.DataFrame):
        return _from_pandas(rows, argument)
    if datasets is not None:
        if isinstance(rows, (datasets.DatasetDict, datasets.IterableDatasetDict)):
            raise ConfigError(
                f"{argument}: has several splits: {', '.join(rows)}; pass one, as in "
                f'data["{next(iter(rows), "train")}"]'
            )
        if isinstance(rows, datasets.IterableDataset):
            raise ConfigError(
                f"{argument}: a streamed data set has no length; pass datasets.Dataset.from_list(list(data.take(1000)))"
            )
        if isinstance(rows, datasets.Dataset):
            return rows
    if isinstance(rows, (list, tuple)):
        return list(rows)
    if hasattr(rows, "__arrow_c_stream__"):
        import datasets as library
        import pyarrow

        return library.Dataset(pyarrow.table(rows))
    fix = "; pass list(rows)" * isinstance(rows, Iterator)
    raise ConfigError(f"{argument}: must be {ACCEPTS} (got {type(rows).__name__}){fix}")


def _from_pandas(frame: pandas.DataFrame, argument: str) -> datasets.Dataset:
    import datasets as library
    import pyarrow

    if duplicates := list(frame.columns[frame.columns.duplicated()]):
        raise ConfigError(f"{argument}: the DataFrame has the column `{duplicates[0]}` twice; rename one")
    for name, column in frame.items():
        try:
            pyarrow.array(column, from_pandas=True)
        except Exception as error:  # pyarrow's errors have no common base class
            why = f"column `{name}` of the DataFrame cannot be converted: {error}"
            fix = 'give each column one type, or pass frame.to_dict("records")'
            raise ConfigError(f"{argument}: {why}; {fix}") from None
    return library.Dataset.from_pandas(frame, preserve_index=False)


def check(rows: Any, argument: str, column: str) -> None:
    """Raise ConfigError if `rows`, from `normalize`, are empty, or if a row has no `column`, the prompt."""
    if len(rows) == 0:
        raise ConfigError(f"{argument}: has no rows; pass at least one prompt")
    for number, names in enumerate([rows.column_names] if not isinstance(rows, list) else rows):
        if not isinstance(names, (Mapping, list)):
            raise ConfigError(f"{argument}: row {number} must be a dict of columns (got {type(names).__name__})")
        if column not in names:
            where = f"row {number} has no column" if isinstance(rows, list) else "has no column"
            has = ", ".join(map(str, names)) or "none"
            hint = did_you_mean(column, map(str, names))
            raise ConfigError(
                f"{argument}: {where} `{column}` (data.prompt_column); it has {has}{hint}; rename it or set the key"
            )


def suffix(rows: Any) -> str:
    """Return the suffix of the file that `write` creates: .jsonl or .parquet."""
    return ".jsonl" if isinstance(rows, list) else ".parquet"


def write(rows: Any, file: Path, argument: str) -> None:
    """Write rows that passed `check`; a list keeps all types. Raises ConfigError for a value that JSON cannot hold."""
    if isinstance(rows, list):
        with file.open("w", encoding="utf-8") as lines:
            for number, row in enumerate(rows):
                lines.write(_line(row, number, argument) + "\n")
        return
    import datasets

    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows.to_parquet(str(file))
    finally:
        if not silent:
            datasets.enable_progress_bars()


def _line(row: Mapping[str, Any], number: int, argument: str) -> str:
    texts = []
    for name, value in row.items():
        try:
            _check_names({name: value})
            texts.append(f"{json.dumps(name)}: {json.dumps(value, default=_json_value)}")
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"{argument}: row {number}: column `{name}` holds no plain data: {error}"
            raise ConfigError(f"{reason}; use texts, numbers, lists and dicts") from None
    return f"{{{', '.join(texts)}}}"


def _check_names(value: Any) -> None:
    """Raise TypeError for a dict key that is not a str: JSON would convert it to one."""
    if isinstance(value, Mapping):
        if invalid := [name for name in value if not isinstance(name, str)]:
            raise TypeError(f"a dict with the key {invalid[0]!r}, a {type(invalid[0]).__name__}")
        value = list(value.values())
    for nested in value if isinstance(value, (list, tuple)) else ():
        _check_names(nested)


def _json_value(value: Any) -> Any:
    """Convert a NumPy number or array."""
    if hasattr(value, "tolist"):
        return value.tolist()
    fix = " (pass .isoformat())" if hasattr(value, "isoformat") else ""
    raise TypeError(f"a {type(value).__name__}{fix}")
