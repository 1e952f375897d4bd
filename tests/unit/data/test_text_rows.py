"""Rows of text files hold what the file says."""

import json

import pytest

from megagrpo.config import DatasetSection
from tests.unit.for_each import for_each

ROWS = [
    {
        "prompt": "a",
        "answer": 10**30,
        "day": "2024-01-01",
        "at": "2024-01-01T10:00:00Z",
        "mixed": 1,
        "info": {"a": 1},
        "list": [],
    },
    {
        "prompt": "b",
        "answer": 0.1,
        "day": "",
        "at": None,
        "mixed": "1",
        "info": {"b": [1, "x", None]},
        "list": [1, "a", {"c": 1}],
    },
    {"prompt": "c", "answer": True, "day": "é\u2028\x85", "at": "x", "mixed": 1.5, "info": {}, "list": [[1], []]},
]


def read(file, **section):
    from megagrpo.data.sources.data_sources import load_rows

    return load_rows(DatasetSection(source=str(file), **section), "data.train", 0, "prompt")


@pytest.mark.parametrize("kind", ["jsonl", "lines with other ends", "json", "indented json", "json of lines"])
def test_values_keep_their_types(tmp_path, kind):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    text = {
        "jsonl": "\n".join(lines),
        "lines with other ends": "\ufeff" + "\r\n\n".join(lines) + "\r\n",
        "json": json.dumps(ROWS),
        "indented json": json.dumps(ROWS, indent=1),
        "json of lines": "\n".join(lines),
    }[kind]
    file = tmp_path / ("rows.jsonl" if "json" not in kind.split() or kind == "jsonl" else "rows.json")
    file.write_text(text, encoding="utf-8", newline="")
    found = list(read(file))
    assert found == ROWS and [type(row["mixed"]) for row in found] == [int, str, float] and found[2]["answer"] is True
    assert list(read(file, split="train[1:]")) == ROWS[1:] and list(read(file, split="x[-1:]", size=5)) == ROWS[2:]


def test_a_row_without_a_column_has_none_there(tmp_path):
    from megagrpo.data.sources.text_rows import JsonRows

    rows = JsonRows([(b'{"a": 1}', ["a"]), (b'{"b": {"c": 2}}', ["b"])])
    assert list(rows) == [{"a": 1, "b": None}, {"a": None, "b": {"c": 2}}] and rows[-1] == rows[1]
    assert list(rows[:1]) == [rows[0]] and list(rows.select([1, 0])) == [rows[1], rows[0]] and len(JsonRows([])) == 0


@for_each(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": 1,}\n', "line 3, column 9 is not valid JSON: "),
        (
            "a.jsonl",
            '{"a": 1}\n[1]\n',
            'line 2 must be an object of columns, as {"prompt": ...} (got a list); correct the line',
        ),
        ("a.jsonl", "{'a': 1}", "line 1, column 2 is not valid JSON: "),
        ("a.jsonl", '{"a": ' + "9" * 5000 + "}", "line 1 cannot be read: "),
        ("a.json", '[{"a": 1},\n {"a" 1}]', "line 2, column 7 is not valid JSON: "),
        ("a.json", '[{"a": 1}, 2]', "element 1 of the list must be an object of columns"),
        (
            "a.csv",
            "prompt,answer\na,1\nb,2,3\n",
            "line 3 has 3 cells, and the header has 2; put cells that hold `,` into",
        ),
        ("a.csv", "prompt,prompt\na,1\n", "line 1 names the column `prompt` twice; rename one"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as error:
        read(tmp_path / name)
    assert str(error.value).startswith(f"data.train.source: {tmp_path / name} cannot be loaded: ") and message in str(
        error.value
    )


def test_every_cell_of_a_csv_file_is_text(tmp_path):
    (tmp_path / "a.csv").write_text(
        '\ufeffprompt,answer,day\n"a ""q"", b\nx",007,2024-01-01\nNA,1e3,\n', encoding="utf-8"
    )
    found = list(read(tmp_path / "a.csv"))
    assert found == [
        {"prompt": 'a "q", b\nx', "answer": "007", "day": "2024-01-01"},
        {"prompt": "NA", "answer": "1e3", "day": ""},
    ]
