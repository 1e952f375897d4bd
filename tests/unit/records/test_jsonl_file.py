"""Lines of JSON files are the bytes of `json.dumps`, whatever encodes their texts."""

import json
import math

import pytest

from megagrpo.records.rows.jsonl_file import _MARK as MARK
from megagrpo.records.rows.jsonl_file import LONG, encoded
from tests.unit.for_each import for_each


def naive(rows: list[dict]) -> bytes:
    """The lines by `json.dumps` alone."""
    lines = [json.dumps(json.loads(json.dumps(row), parse_constant=lambda _: None), ensure_ascii=False) for row in rows]
    return "".join(line + "\n" for line in lines).encode(errors="backslashreplace")


def long(text: str) -> str:
    return text + "x" * LONG


ALL = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))


@for_each(
    "rows",
    [
        [{"step": 1, "a": long('"\\/\b\f\n\r\t\x00\x7f\u2028 <é 漢 🙂>'), "b": [1.5, -0.0, 1e-7, 10**30, True, None]}],
        [{"step": 1, "all": ALL}, {"step": 2, "all": ALL[::-1]}],
        [{"prompt": [{"role": "user", "content": long("a")}, {"content": [long("b"), {"c": long("d")}]}], "e": long("f")}],
        [{"long": long("\ud800 \udfff"), "short": "\ud800", "next": long("a")}],
        [{"a": MARK, "b": long("b")}, {"a": MARK}, {MARK: long("a"), "b": long(MARK)}, {"a": f'"{MARK}"', "b": long("")}],
        [{"a": math.nan, "b": [math.inf, -math.inf], "c": {1: (2, 3)}, "d": long("")}, {}],
        [{"a": "x" * length} for length in (0, LONG - 1, LONG, LONG + 1)],
        [],
    ],
)  # fmt: skip
def test_lines_are_the_bytes_of_json_dumps(rows):
    assert encoded(rows) == naive(rows)


def test_an_object_without_json_is_an_error_that_names_its_type():
    with pytest.raises(TypeError, match="Object of type object is not JSON serializable"):
        encoded([{"a": long(""), "b": object()}])
