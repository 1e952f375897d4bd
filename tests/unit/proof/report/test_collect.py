import fcntl
import json

import pytest

from megagrpo.config import ConfigError
from megagrpo.proof.report.collect import RunFiles, lines_per_step, read_run
from megagrpo.proof.report.reduce import curves, number, result, rows_per_point, state
from megagrpo.proof.report.shown_responses import index_steps
from tests.unit.proof.report.synthetic import append, make_run


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", steps=6)


def test_a_run_is_read_with_its_config_steps_evaluations_messages_and_start(run):
    files = read_run(run)
    assert (
        files.name == "run"
        and files.setting("rollout.num_generations") == 4
        and files.setting("rollout.quantization") == "none"
    )
    assert [row["step"] for row in files.steps] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in files.evaluations] == [0, 2, 4, 6]
    assert files.messages[-1]["text"] == "finished 6 steps" and files.messages[-1]["step"] == 6
    assert files.last_start["ranks"] == 1 and files.last_start["versions"]["torch"]
    assert not files.running and not files.damaged


@pytest.mark.parametrize(
    "prepare, words",
    [
        (lambda folder: None, "no such folder; name the folder of a run"),
        (lambda folder: folder.mkdir(), "holds no metrics.jsonl, so it is not the folder of a run"),
        (lambda folder: (folder.mkdir(), (folder / "metrics.jsonl").touch()), "metrics.jsonl holds no step yet"),
    ],
)
def test_a_folder_without_a_run_is_an_error_that_says_why(tmp_path, prepare, words):
    prepare(tmp_path / "run")
    with pytest.raises(ConfigError, match=words):
        read_run(tmp_path / "run")


def test_the_folder_of_an_old_version_with_metrics_alone_is_a_run(tmp_path):
    append(tmp_path / "metrics.jsonl", {"step": 3, "reward": 0.5})
    files = read_run(tmp_path)
    assert files.name == tmp_path.name and files.last_start == {} and files.config == {}
    figures = result(files)
    assert figures["steps"] == 3 and figures["reward"] == [0.5, 0.5] and figures["evaluation"] is None
    assert (
        figures["tokens"]
        is figures["wall_seconds"]
        is figures["peak_memory_gb"]
        is figures["tokens_per_second"]
        is None
    )
    assert state(files) == {"state": "stopped", "text": "stopped after step 3"}


def test_lines_that_cannot_be_read_are_counted_and_left_out(run):
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(
            b'{"step": 7, "rew\n[1]\n{"step": "8"}\n\xff\n' + b"[" * 100_000 + b'\n\n{"step": 7, "reward": 1}\n{"st'
        )
    (run / "resolved.yaml").write_text("run: {name: x, name: y}\n")
    files = read_run(run)
    assert files.steps[-1] == {"step": 7, "reward": 1}
    assert files.damaged == {"metrics.jsonl": 6, "resolved.yaml": 1}


def test_responses_of_other_steps_are_skipped_without_reading_them(tmp_path):
    file = tmp_path / "completions.jsonl"
    file.write_text(
        '{"step": 1, "reward": 1}\n{"step": 2, broken}\n{"step": 3, "reward": 3}\n{"reward": 4, "step": 3}\n'
    )
    assert {step: lines.count for step, lines in lines_per_step(file).items()} == {1: 1, 2: 1, 3: 1}
    run = RunFiles(tmp_path)
    found = index_steps(run, [1, 3], None)
    assert [list(found[step].rewards) for step in (1, 3)] == [[1], [3, 4]] and not run.damaged


def test_the_last_line_of_a_repeated_step_counts(run):
    append(run / "metrics.jsonl", {"step": 2, "reward": 9.0})
    assert read_run(run).steps[1]["reward"] == 9.0


def test_the_state_of_a_run_is_finished_failed_stopped_or_running(run):
    files = read_run(run)
    assert state(files) == {"state": "finished", "text": "finished, 6 steps"}
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(line for line in lines if json.loads(line)["step"] < 4) + "\n")
    (run / "messages.jsonl").unlink()
    assert state(read_run(run)) == {"state": "failed", "text": "ended early, after step 3 of 6"}
    append(run / "messages.jsonl", {"step": 3, "text": "stop requested (SIGTERM) after step 3"})
    assert state(read_run(run)) == {"state": "stopped", "text": "stopped on request after step 3 of 6"}
    with open(run / ".lock", "w") as lock:  # a killed run leaves this file without a lock
        assert state(read_run(run))["state"] == "stopped"
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state(read_run(run)) == {"state": "running", "text": "running, step 3 of 6"}


def test_runs_of_a_page_are_averaged_over_the_same_number_of_steps():
    long, short = [{}] * 2500, [{}] * 700
    assert [rows_per_point(rows) for rows in ([short], [long], [short, short], [long, short], [[]])] == [1, 2, 1, 3, 1]


def test_curves_keep_gaps_and_average_neighbours():
    rows = [
        {"step": i, "wall_time": 100.0 + i, "loss": float(i), "kl": None if i < 4 else 1.0, "nan": None}
        for i in range(1, 7)
    ]
    whole = curves(rows)
    assert whole["step"] == [1, 2, 3, 4, 5, 6] and whole["per_point"] == 1
    assert whole["metrics"] == {"loss": [1, 2, 3, 4, 5, 6], "kl": [None, None, None, 1, 1, 1]}
    half = curves(rows, 2)
    assert (
        half["step"] == [2, 4, 6]
        and half["metrics"] == {"loss": [1.5, 3.5, 5.5], "kl": [None, 1, 1]}
        and half["per_point"] == 2
    )
    assert curves([])["step"] == []


def test_numbers_are_rounded_to_five_digits_and_others_are_none():
    values = [0.123456789, 123456789.0, 1e-20, 3.0, None, "1", True, float("nan"), float("inf"), 10**400]
    assert [number(value) for value in values[:-1]] == [0.12346, 123460000, 1e-20, 3, None, None, None, None, None]


def test_the_distance_of_the_mismatch_from_one_is_kept():
    rows = [{"step": 1, "token_mult_prob_error": 1.0000088123}]
    assert curves(rows)["metrics"]["token_mult_prob_error"] == [1.000008812]


def test_the_result_has_first_and_last_values_and_totals(run):
    figures = result(read_run(run))
    assert figures["evaluation"] == {"name": "pass@1", "first": 0.25, "last": 0.95, "steps": [0, 6], "count": 4}
    assert figures["steps"] == figures["max_steps"] == 6 and figures["tokens"] == 6 * 153600
    assert figures["training_seconds"] == pytest.approx(sum(row["time/step"] for row in read_run(run).steps), rel=1e-4)
