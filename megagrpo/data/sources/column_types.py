"""One type for a column whose files store it with different types, where every value stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
from pyarrow import types


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
