import importlib.util
import json
from pathlib import Path

import pytest

from tests.unit.records.sinks.tracked import COLUMNS, ENCODED, in_a_process

pytestmark = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is optional")
OPTIONS = "run.wandb={mode: offline, project: sums, entity: us, group: night, tags: [a, b], name: shown}"


def records(file: Path) -> list:
    """The records of a .wandb file: a log of LevelDB's format (blocks of 32 KiB; crc, length, type, data) after 7
    bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts, found = file.read_bytes(), 7, [], []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(b"".join(parts)))
            parts = []
    return found


def history(file: Path) -> list[dict]:
    rows = [record.history.item for record in records(file) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The .wandb files of a run, of its continuation from step 1, and of a run that fails."""
    folder = tmp_path_factory.mktemp("wandb")
    variables = dict(WANDB_PROJECT="not this one", WANDB_ERROR_REPORTING="false")
    assert in_a_process("wandb", folder, ("0", "1", "fails"), "run.trackers=[wandb]", OPTIONS, **variables) == 3
    found = [file for name in ("mine", "failed") for file in sorted(folder.glob(f"{name}/wandb/offline-run-*/*.wandb"))]
    assert len(found) == 3
    return found


def exit_codes(file: Path) -> list[int]:
    return [record.exit.exit_code for record in records(file) if record.WhichOneof("record_type") == "exit"]


def test_a_run_that_an_error_ends_is_failed_and_another_is_finished(files):
    assert [exit_codes(file) for file in files] == [[0], [0], [1]]


def test_a_run_and_its_continuation_are_one_run_with_its_options_and_its_config(files):
    runs = [next(r.run for r in records(file) if r.WhichOneof("record_type") == "run") for file in files[:2]]
    assert runs[0].run_id == runs[1].run_id == files[0].stem.removeprefix("run-")
    for run in runs:
        assert (run.project, run.entity, run.run_group, list(run.tags), run.display_name) == (
            "sums",
            "us",
            "night",
            ["a", "b"],
            "shown",
        )
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["run"]["name"] == "mine" and config["rollout"]["num_generations"] > 1


def test_metrics_have_the_runs_step_and_tables_hold_every_response(files):
    first, second = history(files[0]), history(files[1])
    assert [(row["step"], row["reward"]) for row in first if "reward" in row] == [(1, 0.1), (2, 0.2)]
    assert [(row["step"], row["reward"]) for row in second if "reward" in row] == [(2, 0.2), (3, 0.3)]
    assert [(row["step"], row["eval/pass@1"]) for row in first if "eval/pass@1" in row] == [(0, 0.5)]
    tables = [
        json.loads(file.read_text()) for file in sorted(files[0].parent.glob("files/media/table/completions*.json"))
    ]
    assert len(tables) == 2 and tables[0]["columns"] == COLUMNS
    assert sorted(table["data"][1] for table in tables) == [
        [step, "3 + 4?", ENCODED, 1.0, None, "7", 1.0, 1.0] for step in (1, 2)
    ]
    defined = [r.metric for r in records(files[0]) if r.WhichOneof("record_type") == "metric"]
    assert any(metric.glob_name == "*" and metric.step_metric == "step" for metric in defined)
