import json
import sqlite3

import pytest

from tests.unit.records.sinks.tracked import COLUMNS, ENCODED, in_a_process


@pytest.mark.full
def test_a_run_and_its_continuation_are_one_run_in_a_local_database(tmp_path):
    pytest.importorskip("trackio")
    store = tmp_path / "store"
    options = ["run.trackers=[trackio]", "run.trackio={project: sums, group: night, name: shown}"]
    variables = dict(TRACKIO_DIR=str(store), HF_HUB_OFFLINE="1")
    assert in_a_process("trackio", tmp_path, ("0", "1"), *options, **variables) == 0
    with sqlite3.connect(next(store.glob("sums*.db"))) as database:
        rows = [
            (run, step, json.loads(metrics))
            for run, step, metrics in database.execute("select run_id, step, metrics from metrics")
        ]
        configs = database.execute("select run_name, config from configs").fetchall()
    assert len({run for run, _, _ in rows}) == 1
    assert sorted((step, m["reward"]) for _, step, m in rows if "reward" in m) == [
        (1, 0.1),
        (2, 0.2),
        (2, 0.2),
        (3, 0.3),
    ]
    assert [(step, m["eval/pass@1"]) for _, step, m in rows if "eval/pass@1" in m] == [(0, 0.5)]
    table = next(m["completions"] for _, step, m in rows if step == 3 and "completions" in m)
    assert table["_value"][1] == dict(zip(COLUMNS, [3, "3 + 4?", ENCODED, 1.0, None, "7", 1.0, 1.0], strict=True))
    assert {name for name, _ in configs} == {"shown"} and json.loads(configs[0][1])["run"]["name"] == "mine"
