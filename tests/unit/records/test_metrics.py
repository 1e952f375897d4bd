import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megagrpo.config import load_config
from megagrpo.records.console import ConsoleSink
from megagrpo.records.rows import jsonl_file
from megagrpo.records.rows.jsonl_file import JsonlFile, encoded
from megagrpo.records.rows.jsonl_file import _step_of as step_of
from megagrpo.records.writer import MetricsWriter
from megagrpo.types import Prompt, Rollout, ScoredRollout
from tests.unit.records.completion_rows import completion_parts, completion_rows

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
STEP = {"reward": 0.52, "reward_std": 0.31, "kl": 0.1, "entropy": 1.9, "grad_norm": 2.3, "time/generate": 6.1} | {
    "time/train": 5.2
}
STEP["time/step"] = 11.3


def config(*overrides: str):
    return load_config(CONFIG, ["run.trackers=[]", "run.max_steps=10", *overrides])


def scored(reward: float | None, text: str = "3 + 4 = 7", prompt_id: int = 5) -> ScoredRollout:
    prompt = Prompt(prompt_id, (1, 2), [{"role": "user", "content": "What is 3 + 4?"}])
    rollout = Rollout(prompt, (9, 2), (-0.1, -0.2), "stop", 1, text)
    return ScoredRollout(rollout, {"exact_number": reward}, math.nan if reward is None else reward)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def printed(method: str, *arguments, terminal: bool = False, columns: int = 100, overrides: tuple = ()) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=columns, highlight=False)
    if method == "completions":
        step, *samples = arguments
        arguments = (step, completion_rows(step, *samples))
    getattr(ConsoleSink(config(*overrides), console), method)(*arguments)
    return file.getvalue()


def test_each_step_and_evaluation_is_a_line_that_is_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path, config())
    writer.evaluation(0, {"reward": 0.33})
    writer.step(1, STEP | {"kl": math.nan})
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first["step"] == 0 and first["eval/reward"] == 0.33
    assert second["step"] == 1 and second["reward"] == 0.52 and second["kl"] is None and second["wall_time"] > 1e9


def test_metrics_of_single_layers_are_one_value_of_the_file_and_reach_no_tracker(tmp_path):
    seen = []

    class Tracker:
        def step(self, step, metrics):
            seen.append(metrics)

    writer = MetricsWriter(tmp_path, config())
    writer._sinks["tracker"] = Tracker()
    agreement = {"routing/agreement": 0.9, "routing/agreement_min": 0.8}
    writer.step(1, STEP | agreement | {f"routing/agreement/{layer}": 0.8 + layer / 1000 for layer in range(94)})
    writer.step(2, STEP)
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first["routing/agreement_by_layer"] == {str(layer): 0.8 + layer / 1000 for layer in range(94)}
    assert seen == [STEP | agreement, STEP]
    assert not [name for name in first if name.startswith("routing/agreement/")]
    assert not [name for name in second if name.startswith("routing/")]


def test_completions_keep_everything_about_each_rollout(tmp_path):
    writer = MetricsWriter(tmp_path, config())
    writer.completions(3, iter(completion_parts(3, [scored(1.0), scored(None, "π?\n")], [0.9, 0.0])))
    first, second = lines(tmp_path / "completions.jsonl")
    assert first == dict(
        step=3, prompt_id=5, prompt=[{"role": "user", "content": "What is 3 + 4?"}], completion="3 + 4 = 7"
    ) | dict(num_tokens=2, finish_reason="stop", reward=1.0, rewards={"exact_number": 1.0}, advantage=0.9) | dict(
        weight_version=1
    )
    assert second["reward"] is None and second["rewards"] == {"exact_number": None} and second["completion"] == "π?\n"


def test_a_resumed_run_drops_what_came_after_the_checkpoint_and_a_line_cut_short(tmp_path):
    writer = MetricsWriter(tmp_path, config())
    for step in (1, 2, 3, 4):
        writer.step(step, STEP)
        writer.completions(step, iter(completion_parts(step, [scored(1.0)], [0.0])))
    writer.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "rew')
    writer = MetricsWriter(tmp_path, config(), restored_step=2)
    writer.step(3, STEP | {"reward": 0.9})
    assert [(row["step"], row["reward"]) for row in lines(tmp_path / "metrics.jsonl")] == [
        (1, 0.52),
        (2, 0.52),
        (3, 0.9),
    ]
    assert [row["step"] for row in lines(tmp_path / "completions.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("name", "error", "calls"),
    [
        ("tensorboard", RuntimeError("no connection"), 1),
        ("tensorboard", OSError("disk full"), 3),
        ("wandb", OSError("no route to host"), 1),
    ],
)
def test_a_sink_that_fails_is_named_once_the_others_go_on_and_only_files_are_tried_again(
    tmp_path, capsys, name, error, calls
):
    called = []

    class Broken:
        def step(self, step, metrics):
            called.append(step)
            raise error

    writer = MetricsWriter(tmp_path, config())
    writer._sinks = {name: Broken(), **writer._sinks}
    for step in (1, 2, 3):
        writer.step(step, STEP)
    message = f"warning: {name} failed and may be incomplete; training continues. {type(error).__name__}: {error}\n"
    assert capsys.readouterr().err == message and len(called) == calls
    assert len(lines(tmp_path / "metrics.jsonl")) == 3


def test_a_line_that_a_full_disk_breaks_is_removed_and_no_other(tmp_path):
    path = tmp_path / "m.jsonl"
    file = JsonlFile(path, 0)
    file.append([{"step": 1}])
    whole = file._file

    class Full:
        seek, truncate = whole.seek, whole.truncate

        def write(self, data):
            if len(data) < 12:
                raise OSError(28, "No space left on device")
            return whole.write(data[:5])

    file._file = Full()
    with pytest.raises(OSError, match="No space"):
        file.append([{"step": 2}, {"step": 2, "reward": 0.5}])
    file._file = whole
    stored = file.store([encoded([{"step": 3}])])
    file.close()
    assert [row["step"] for row in lines(path)] == [1, 2, 3] and list(stored) == [{"step": 3}]


def test_a_resumed_run_reads_and_cuts_only_the_end_of_its_files(tmp_path, monkeypatch):
    path, read = tmp_path / "m.jsonl", []
    written = encoded({"step": step, "text": "long" * step} for step in range(1, 1001))
    path.write_bytes(written + b'{"step": 1001, "re')
    inode = path.stat().st_ino
    monkeypatch.setattr(jsonl_file, "_step_of", lambda line: read.append(line) or step_of(line))
    JsonlFile(path, 990).close()
    assert [row["step"] for row in lines(path)] == list(range(1, 991)) and path.stat().st_ino == inode
    assert len(read) == 12  # the broken line, ten lines to cut, and one to keep
    for last, left in ((990, 990), (0, 0), (5, 0)):
        JsonlFile(path, last).close()
        assert path.read_bytes().count(b"\n") == left
    path.write_bytes(b"no json\n\n")
    JsonlFile(path, 5).close()
    assert path.read_bytes() == b""


def test_a_run_folder_that_cannot_be_written_is_reported_and_training_goes_on(capsys):
    writer = MetricsWriter("/proc/none", config())
    writer.step(1, STEP)
    assert "metrics.jsonl and completions.jsonl failed" in capsys.readouterr().err


def test_a_silent_writer_writes_nothing(tmp_path, capsys):
    writer = MetricsWriter.silent()
    writer.step(1, STEP)
    writer.message("hello")
    writer.close()
    assert capsys.readouterr() == ("", "") and not list(tmp_path.iterdir())


def test_the_step_line_reads_in_one_glance():
    assert printed("step", 3, STEP) == (
        "step  3/10  reward  0.520  std 0.310  entropy 1.900  grad   2.30   11.3s  generate 6.1 + train 5.2\n"
    )
    assert "kl 0.1000" in printed("step", 3, STEP, overrides=("algorithm.beta=0.1",))


FULL_STEP = STEP | {
    "completions/mean_length": 21.8, "completions/clipped_ratio": 0.8, "clip_ratio/region_mean": 0.0, "tokens_per_second": 152.0,
    "staleness/mean": 0.5, "idle/trainer": 0.2, "time/reward": 0.3, "time/logprobs": 1.5, "time/sync": 1.9,
    "rewards/exact_number/exceptions": 3.0, "train/skipped_steps": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("columns", [60, 100, 200])
def test_no_line_of_a_step_is_wider_than_100_columns_or_a_narrower_terminal(terminal, columns):
    text = printed("step", 3, FULL_STEP, terminal=terminal, columns=columns, overrides=("algorithm.beta=0.1",))
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    assert len(lines) > 1 and max(map(len, lines)) <= (min(columns, 100) if terminal else 100)
    assert lines[0].startswith("step  3/10  reward  0.520") and all(line.startswith(" " * 14) for line in lines[1:])
    words = " ".join(" ".join(lines).split())
    for cell in (
        "kl 0.1000",
        "tok/s 152",
        "11.3s",
        "generate 6.1 + reward 0.3 + logprobs 1.5 + train 5.2 + sync 1.9",
        "exceptions 3",
    ):
        assert cell in words


def test_a_long_response_goes_on_in_indented_lines():
    text = "A tale of two cities. " * 20
    for terminal in (False, True):
        shown = [
            re.sub(r"\x1b\[[0-9;]*m", "", line)
            for line in printed(
                "completions", 1, [scored(1.0, text)], [0.5], terminal=terminal, columns=160
            ).splitlines()
        ]
        assert max(map(len, shown)) <= 100
        assert " ".join(" ".join(shown).replace("│", " ").split()).count("A tale of two cities.") == 20
    assert "advantage +0.50" in "".join(printed("completions", 1, [scored(1.0, "x" * 250)], [0.5]).split("\n"))


def test_the_evaluation_line_is_short_and_what_went_wrong_is_on_it():
    metrics = {
        "eval/reward": 0.333,
        "eval/num_tokens": 900.0,
        "eval/rewards/accuracy/timeouts": 2.0,
        "eval/rewards/format/timeouts": 0.0,
    }
    assert printed("evaluation", 0, metrics) == "evaluation after step 0  reward  0.333  rewards/accuracy/timeouts 2\n"
    assert "rewards/accuracy/exceptions 1" in printed("step", 1, STEP | {"rewards/accuracy/exceptions": 1.0})


def test_a_pipe_gets_no_escape_codes_and_a_terminal_gets_colour():
    assert "\x1b" not in printed("step", 3, STEP)
    assert "\x1b" in printed("step", 3, STEP, terminal=True)


def test_the_sample_shows_the_best_and_the_worst_of_a_group_that_differs():
    samples = [
        scored(0.0, "same", 1),
        scored(0.0, "same", 1),
        scored(1.0, "good [bold]7[/bold]", 2),
        scored(0.0, "bad\n8", 2),
    ]
    text = printed("completions", 1, samples, [0.0, 0.0, 1.0, -1.0])
    assert text.splitlines() == [
        "    prompt    What is 3 + 4?",
        "    response  good [bold]7[/bold]  -> reward 1.00 (exact_number 1.00)  advantage +1.00",
        "    response  bad⏎8  -> reward 0.00 (exact_number 0.00)  advantage -1.00",
    ]
    assert "same" in printed("completions", 1, samples[:2], [0.0, 0.0])
    assert "reward - (exact_number -)" in printed("completions", 1, [scored(None)], [math.nan])


def test_samples_are_shown_every_k_steps():
    shown = [
        bool(printed("completions", s, [scored(1.0)], [0.0], overrides=("run.log_completions_steps=3",)))
        for s in range(1, 7)
    ]
    assert shown == [False, False, True, False, False, True]
    assert not printed("completions", 1, [scored(1.0)], [0.0], overrides=("run.log_completions_steps=0",))


def test_a_closed_console_does_not_stop_the_run(tmp_path):
    code = (
        "import os, sys; from megagrpo.config import load_config; from megagrpo.records.writer import MetricsWriter\n"
        "w = MetricsWriter(sys.argv[1], load_config(sys.argv[2], ['run.trackers=[]']))\n"
        "sys.stdin.read()\n"
        "for s in (1, 2): w.step(s, {'reward': 0.5})\n"
        "w.close(); os._exit(7)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path), str(CONFIG)]
    child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ)
    child.stdout.close()
    child.stdin.close()
    assert child.wait(60) == 7 and len(lines(tmp_path / "metrics.jsonl")) == 2
