"""Every format of data: values written are the values read, and a file that is not what its name says is refused with a
sentence."""

import bz2
import csv
import datetime
import gzip
import io
import json
import re
from decimal import Decimal

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megagrpo.config import DatasetSection
from megagrpo.rewards.workers.channel import as_json, from_json
from tests.unit.for_each import for_each

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    [
        "2024-05-01",
        "2024-01-01T10:00:00Z",
        "007",
        "1e3",
        "NA",
        "null",
        "true",
        "",
        " x ",
        "a\u2028b",
        "\x00",
        '"',
        "a\r\nb",
        "\ufeff",
        ",;\t",
    ]
)
NUMBER = st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()
VALUE = st.recursive(
    TEXT | NUMBER, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
ROWS = st.lists(
    st.fixed_dictionaries({"prompt": TEXT, "answer": VALUE, "a column.of é": VALUE}), min_size=1, max_size=4
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("formats")


def read(source, split="train", **section):
    from megagrpo.data.sources.data_sources import load_rows

    return list(load_rows(DatasetSection(source=str(source), split=split, **section), "data.train", 0, "prompt"))


def as_csv(rows, delimiter=","):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def exact(value):
    """A value with its types: True and 1 differ, as do 1 and 1.0; two NaN do not."""
    return json.dumps(value, sort_keys=True)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS, st.booleans())
def test_rows_are_read_as_they_were_written(folder, rows, ascii_only):
    """In JSON every value, in csv every text."""
    lines = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows).encode()
    texts = [{"prompt": row["prompt"], "answer": str(row["answer"])} for row in rows]
    files = {
        "a.jsonl": lines,
        "A.JSONL.GZ": gzip.compress(lines),
        "a.ndjson.bz2": bz2.compress(lines),
        "a.jsonl.zst": pyarrow.Codec("zstd").compress(lines, asbytes=True),
        "a.json": json.dumps(rows, indent=2, ensure_ascii=ascii_only).encode("utf-8-sig"),
        "list.jsonl": json.dumps(rows).encode(),
        "after each other.json": b"\r\n".join(json.dumps(row, indent=1).encode() for row in rows),
        "in an object.json": json.dumps({"version": 1, "data": rows}).encode(),
        "a.csv": as_csv(texts),
        "a.tsv": as_csv(texts, "\t"),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
        assert exact(read(folder / name)) == exact(texts if name.endswith("sv") else rows), name


COLUMNS = {
    "text": pyarrow.array(["2024-05-01", None]),
    "large text": pyarrow.array(["x", ""], pyarrow.large_string()),
    "category": pyarrow.array(["x", None]).dictionary_encode(),
    "uint64": pyarrow.array([2**64 - 1, None], pyarrow.uint64()),
    "float": pyarrow.array([1.0, None]),
    "bool": pyarrow.array([True, None]),
    "bytes": pyarrow.array([b"\xff\x00", None]),
    "date": pyarrow.array([datetime.date(2024, 5, 1), None]),
    "microseconds": pyarrow.array([datetime.datetime(2024, 5, 1, 2, 3, 4, 5), None], pyarrow.timestamp("us")),
    "nanoseconds": pyarrow.array([datetime.datetime(2024, 5, 1, 2, 3, 4, 5), None], pyarrow.timestamp("ns")),
    "duration": pyarrow.array([datetime.timedelta(1, 2, 3), None], pyarrow.duration("ns")),
    "decimal": pyarrow.array([Decimal("1.10"), Decimal(10**30)], pyarrow.decimal256(60, 2)),
    "lists": pyarrow.array([["a", None], []]),
    "struct": pyarrow.array([{"a": 1}, {"b": None}], pyarrow.struct({"a": pyarrow.int64(), "b": pyarrow.int64()})),
    "nulls": pyarrow.nulls(2),
}


@pytest.mark.parametrize("kind", ["file", "folder", "arrow file", "save_to_disk"])
def test_a_typed_column_arrives_as_python_values_at_a_reward(tmp_path, kind):
    import datasets

    table = pyarrow.table({"prompt": ["p", "q"], **COLUMNS})
    wanted = table.to_pylist()
    if kind == "file":
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    elif kind == "folder":
        for number in (0, 1):
            pyarrow.parquet.write_table(table.slice(number, 1), tmp_path / f"train-0000{number}-of-00002.parquet")
    elif kind == "arrow file":
        with (
            pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
    else:
        datasets.DatasetDict(train=datasets.Dataset(table)).save_to_disk(tmp_path)
    source = next(
        (path for path in tmp_path.iterdir() if path.suffix in (".parquet", ".arrow") and "file" in kind), tmp_path
    )
    found = read(source)
    assert found == wanted and found[0]["uint64"] == 2**64 - 1 and found[1]["struct"] == {"a": None, "b": None}
    at_the_reward = from_json(json.loads(json.dumps(as_json(found))))
    assert at_the_reward == wanted
    plain = {str, int, float, bool, bytes, list, dict, type(None), Decimal}
    assert {type(value) for row in at_the_reward for value in row.values()} <= plain | {
        datetime.date,
        datetime.datetime,
        datetime.timedelta,
    }


def arrays(*columns):
    return [column if isinstance(column, pyarrow.Array) else pyarrow.array(column) for column in columns]


@for_each(
    "columns",
    [
        arrays(*columns)
        for columns in (
            (pyarrow.array([1], pyarrow.int32()), [2**40]),
            (pyarrow.array([0.5], pyarrow.float32()), [0.1]),
            (pyarrow.nulls(1), ["007"]),
            (["a"], pyarrow.array(["b"]).dictionary_encode()),
            ([[]], [["a"]]),
            ([{"a": 1}], [{"a": 2, "b": "x"}]),
        )
    ],
)
def test_files_of_a_folder_keep_values_that_one_type_holds(tmp_path, columns):
    for number, column in enumerate(columns):
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["p"], "answer": column}), tmp_path / f"{number}.parquet")
    written = [column.to_pylist()[0] for column in columns]
    wanted = [value | {"b": value.get("b")} if isinstance(value, dict) else value for value in written]
    assert [row["answer"] for row in read(tmp_path)] == wanted


@for_each(
    "columns",
    [
        arrays(*columns)
        for columns in (
            ([72], ["007"]),
            (["007"], [72]),
            ([72], [0.5]),
            ([1], pyarrow.array([2**64 - 1], pyarrow.uint64())),
            ([True], [2]),
            ([[1]], [["a"]]),
            ([{"a": 1}], [{"a": "007"}]),
            ([datetime.date(2024, 5, 1)], ["2024-05-01"]),
        )
    ],
)
def test_files_of_a_folder_whose_types_differ_are_refused_by_column(tmp_path, columns):
    for number, column in enumerate(columns):
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["p"], "answer": column}), tmp_path / f"{number}.parquet")
    types = [str(column.type).replace("item", "element") for column in columns]  # parquet renames the field
    places = [f"{kind} in {tmp_path}/{number}.parquet" for number, kind in enumerate(types)]
    with pytest.raises(ValueError, match=re.escape(f"column `answer` is {places[0]} and {places[1]}")):
        read(tmp_path)


GZIP = {"empty": gzip.compress(b"", mtime=0), "row": gzip.compress(b'{"prompt": "a"}', mtime=0)}
HARD = {"prompt": "p", "answer": "2024-05-01", "n": 10**30, "mixed": [1, "a", None]}


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"],
        ["data/train.jsonl", "data/test.jsonl"],
        ["b.jsonl.gz", "a.jsonl.gz"],
        ["train/1.json", "train/2.json"],
    ],
)
def test_text_files_of_a_folder_are_read_as_single_files_are(tmp_path, names):
    for number, name in enumerate(sorted(names)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content = (json.dumps(HARD | {"number": number}) + "\n").encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    two_splits = "data/test.jsonl" in names
    wanted = [HARD | {"number": number} for number in (0, 1)]
    assert exact(read(tmp_path)) == exact(wanted[1:] if two_splits else wanted)
    assert exact(read(tmp_path, "train[-1:]")) == exact(wanted[1:])
    if two_splits:
        assert exact(read(tmp_path, "train+test[:1]")) == exact(wanted[::-1])
        with pytest.raises(
            ValueError, match=r"data\.train\.source: .* cannot be loaded: it has no split `tset`; it has train, test$"
        ):
            read(tmp_path, "tset")


def test_a_configuration_in_a_folder_s_card_names_its_files(tmp_path):
    for name in ("x", "y"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(HARD | {"from": name}))
    configs = "".join(f"- config_name: {n}\n  data_files:\n  - split: train\n    path: {n}.jsonl\n" for n in ("x", "y"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert exact(read(tmp_path, subset="y")) == exact([HARD | {"from": "y"}])
    with pytest.raises(ValueError, match=r"data\.train\.source: .* cannot be loaded: BuilderConfig 'z' not found"):
        read(tmp_path, subset="z")


def test_a_hub_data_set_in_the_hub_s_cache_is_read_offline(tmp_path, monkeypatch):
    import datasets

    commit, repo = "1" * 40, tmp_path / "hub" / "datasets--org--rows"
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "abc").write_text(json.dumps(HARD))
    (repo / "snapshots" / commit / "test.jsonl").symlink_to(repo / "blobs" / "abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert exact(read("org/rows", "test")) == exact([HARD])
    with pytest.raises(ValueError, match="no split `train`; it has test"):
        read("org/rows")


def test_values_that_json_can_only_just_hold(tmp_path):
    lines = (
        rb'{"a": NaN, "b": -Infinity, "c": "\ud800", "d": 1e308, "e": {}, "f": {"a": null}}'
        + b"\n"
        + rb'{"a": null, "f": {}}'
    )
    (tmp_path / "a.jsonl").write_bytes(lines)
    first, second = read(tmp_path / "a.jsonl")
    assert exact(first) == exact(
        {"a": float("nan"), "b": float("-inf"), "c": "\ud800", "d": 1e308, "e": {}, "f": {"a": None}}
    )
    assert second == {**dict.fromkeys("abcde"), "f": {}}


def test_a_csv_file_may_end_its_lines_with_a_carriage_return(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'prompt,answer\r"a\rb",1\r\rc,2')
    assert read(tmp_path / "a.csv") == [{"prompt": "a\rb", "answer": "1"}, {"prompt": "c", "answer": "2"}]


def test_a_cell_of_csv_may_be_long_and_hold_lines(tmp_path):
    (tmp_path / "a.csv").write_bytes(
        as_csv([{"prompt": "x\r\n" * 100_000, "answer": "1"}, {"prompt": "", "answer": "2"}])
    )
    assert read(tmp_path / "a.csv") == [{"prompt": "x\r\n" * 100_000, "answer": "1"}, {"prompt": "", "answer": "2"}]


@for_each(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "is empty (0 bytes); name a file with rows"),
        ("a.csv", b"", "is empty (0 bytes); name a file with rows"),
        ("a.parquet", b"", "is empty (0 bytes); name a file with rows"),
        ("a.jsonl.gz", GZIP["empty"], "holds only white space; name a file with rows"),
        ("a.jsonl", b"\xef\xbb\xbf \r\n\n", "holds only white space; name a file with rows"),
        ("a.json", b" [ ]\n", "holds an empty list; name a file with rows"),
        ("a.csv", b"prompt,answer\n\n", "has a header, but no rows; name a file with rows"),
        (
            "a.jsonl",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "is a git-lfs pointer, not the data; run `git lfs pull`",
        ),
        (
            "a.parquet",
            b"version https://git-lfs.github.com/spec/v1\n",
            "is a git-lfs pointer, not the data; run `git lfs pull`",
        ),
        ("a.csv", b"\n<!DOCTYPE html><html>", "is a web page, not data; download the file itself"),
        ("a.jsonl", b"PAR1\x15", "is a .parquet file; let its name end in .parquet"),
        ("a.jsonl", GZIP["row"], "is a .gz file; let its name end in .gz"),
        ("a.csv", b"PK\x03\x04", "is a zip archive or an Excel file; unpack it, or export it as csv"),
        ("a.parquet", b'{"prompt": "a"}', "is no .parquet file; rename it to what it is"),
        ("a.jsonl.gz", b'{"prompt": "a"}', "is no .gz file; rename it to what it is"),
        ("a.csv", b'{"prompt": "a"}', "is JSON; let its name end in .jsonl"),
        ("a.jsonl", '{"prompt": "é"}'.encode("utf-16"), "is not UTF-8 text (UTF-16); save it in UTF-8"),
        ("a.jsonl.gz", GZIP["row"][:-9], "cannot be loaded: EOFError: Compressed file ended before"),
        ("a.jsonl", b"{}\n{}", "the rows of "),
        (
            "a.jsonl",
            b'{"a": 1}\n{"a": {"b": 1, "b": 2}}',
            "line 2 cannot be read: `b` occurs twice in an object; rename one; correct the line",
        ),
        (
            "a.json",
            b'[{"a": 1e400}]',
            "element 0 of the list cannot be read: 1e400 is beyond a 64-bit float; write it as text",
        ),
        ("a.json", b'[{"a": 1} {"a": 2}]', "line 1, column 11 is not valid JSON: expecting `,` or `]`"),
        ("a.json", b'[{"a": 1},]', "line 1, column 11 is not valid JSON: Expecting value"),
        ("a.json", b'[{"a": 1}', "line 1, column 10 is not valid JSON: expecting `,` or `]`"),
        ("a.json", b'[{"a": 1}] []', "line 1, column 12 is not valid JSON: text after the list"),
        (
            "a.json",
            b'{"prompt": ["a", "b"]}',
            "the object holds columns, not rows; save a list of rows, as pandas does with orient='records'",
        ),
        ("a.json", b'{"prompt": {"0": "a"}}', "the object holds columns, not rows; save a list of rows"),
        ("a.json", b"3", 'value 0 must be an object of columns, as {"prompt": ...} (got a int)'),
        ("a.csv", b'prompt,answer\n"a,1\n', "line 2 is not valid csv: unexpected end of data"),
        (
            "a.csv",
            b'prompt,answer\n\n"a\nb",1\nc\n',
            "line 5 has 1 cells, and the header has 2; put cells that hold `,` into double quotes",
        ),
        (
            "a.csv",
            b"prompt;answer\na, b;1\n",
            "line 1 is one column, `prompt;answer`, separated by ';'; save the file with ','",
        ),
        ("a.tsv", b"prompt\tprompt\na\tb\n", "line 1 names the column `prompt` twice"),
        ("a.txt.gz", b"", "must end in one of .jsonl"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "folder" / "data").mkdir(parents=True)
    (tmp_path / "folder" / "data" / name.replace("a.", "train.")).write_bytes(content)
    for source in [tmp_path / name] + [tmp_path / "folder"] * (".txt" not in name):
        with pytest.raises(ValueError) as error:
            read(source)
        assert str(error.value).startswith("data.train.source: ") and message in str(error.value)
        assert "\n" not in str(error.value)


def test_other_sources_without_rows_are_named(tmp_path):
    import datasets

    (tmp_path / "nothing").mkdir()
    with pytest.raises(
        ValueError, match=r"nothing cannot be loaded: it has no data files; put files that end in \.jsonl, .* there$"
    ):
        read(tmp_path / "nothing")
    rows = datasets.Dataset.from_list([{"prompt": "a"}])
    datasets.DatasetDict(train=rows, test=rows.select([])).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == [{"prompt": "a"}]
    with pytest.raises(ValueError, match=r"saved cannot be loaded: it has no rows; name another folder or split$"):
        read(tmp_path / "saved", "test")


def test_columns_of_parquet_that_a_row_cannot_have_are_named(tmp_path):
    maps = pyarrow.array([[("a", 1)]], pyarrow.map_("string", "int64"))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "m": maps}), tmp_path / "m.parquet")
    with pytest.raises(
        ValueError, match=r"m\.parquet: column `m` holds maps, which no row can hold; store structs or lists$"
    ):
        read(tmp_path / "m.parquet")
    twice = pyarrow.Table.from_arrays([maps, pyarrow.array([1]), pyarrow.array([2])], names=["prompt", "x", "x"])
    pyarrow.parquet.write_table(twice.select([1, 2]), tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice\.parquet has the column `x` twice; rename one$"):
        read(tmp_path / "twice.parquet")


def test_an_empty_shard_of_a_folder_adds_no_rows(tmp_path):
    for suffix in ("parquet", "jsonl"):
        (tmp_path / suffix).mkdir()
        for number, rows in enumerate(([], [{"prompt": "a"}, {"prompt": "b"}])):
            shard = tmp_path / suffix / f"train-{number}.{suffix}"
            if suffix == "parquet":
                pyarrow.parquet.write_table(
                    pyarrow.table({"prompt": pyarrow.array([row["prompt"] for row in rows], "string")}), shard
                )
            else:
                shard.write_text("\n".join(map(json.dumps, rows)))
        assert read(tmp_path / suffix, "train[1:]") == [{"prompt": "b"}]
