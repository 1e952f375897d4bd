import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.records.sinks import tracked
from tests.unit.records.sinks.tracked import COLUMNS, ENCODED


def test_a_run_and_its_continuation_are_one_run_in_a_local_database(tmp_path):
    pytest.importorskip("trackio")
    store = tmp_path / "store"
    for restored in ("0", "1"):
        options = ["run.trackers=[trackio]", "run.trackio={project: sums, group: night, name: shown}"]
        command = [sys.executable, "-m", "tests.unit.records.sinks.tracked", str(tmp_path / "mine"), restored, *options]
        environment = os.environ | {"TRACKIO_DIR": str(store), "HF_HUB_OFFLINE": "1"}
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=Path(tracked.__file__).parents[4], env=environment
        )
        assert ended.returncode == 0 and ended.stderr == "" and "rackio" not in ended.stdout
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
