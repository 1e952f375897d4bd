"""The console's lines with extreme values, on terminals and in pipes, and at each log level."""

import io
import json
import os
import re
import sys

import pytest
from rich.console import Console

from megagrpo.config import load_config
from megagrpo.platform.process.terminal import write_output
from megagrpo.records.console import EVALUATION_COLUMNS, STEP_COLUMNS, ConsoleSink
from megagrpo.records.writer import MetricsWriter
from megagrpo.types import Prompt, Rollout, ScoredRollout
from tests.unit.for_each import for_each
from tests.unit.records.completion_rows import completion_rows
from tests.unit.records.test_metrics import CONFIG

COLOURS = re.compile(r"\x1b\[[\d;]*m")
PATH = "/" + "a_folder_with_a_long_name/" * 6
WARNING = f"warning: step 3: token_mult_prob_error 1.31 is above 1.1: {'look at the log ' * 20} {PATH}"
EXTREMES = [0.0, -1e30, 1e30, 123456789.123, float("inf"), float("nan")]


def lines(*calls: tuple, terminal: bool = False, columns: int = 100, overrides: tuple = ()) -> list[str]:
    """What these calls of a sink print, without colours."""
    file = io.StringIO()
    config = load_config(CONFIG, ["run.trackers=[]", "algorithm.beta=0.1", *overrides])
    sink = ConsoleSink(config, Console(file=file, force_terminal=terminal, width=columns, highlight=False))
    for method, *arguments in calls:
        getattr(sink, method)(*arguments)
    return COLOURS.sub("", file.getvalue()).splitlines()


def test_a_step_shows_the_rewards_of_its_tasks_and_of_many_the_first_twelve():
    names = [*"abc", *(f"task_{i}_{'x' * (i % 3 * 40)}" for i in range(17))]
    override = f"tasks={json.dumps([{'name': name} for name in names])}"
    metrics = {f"tasks/{name}/reward": 0.25 * i for i, name in enumerate(names) if name != "b"}
    first, second, *rest = lines(("step", 1, {"reward": 0.5} | metrics), overrides=(override,))
    assert first.startswith("step 1/") and second.startswith("     reward of  a 0.000  c 0.500  task_0_ 0.750")
    assert rest[-1].endswith("  and 7 more") and max(map(len, rest)) <= 100
    shown = lines(("step", 1, {"reward": 0.5, "tasks/a/groups": 0.0}), overrides=(override,))
    assert len(shown) == 1  # no task has a prompt in this step


@for_each("value", EXTREMES)
@for_each(("terminal", "columns"), [(False, 80), (True, 100), (True, 300), (True, 72)])
def test_steps_evaluations_and_samples_with_extreme_values_fit_100_columns(value, terminal, columns):
    metrics = {name: value for _, name, _ in STEP_COLUMNS} | {
        f"time/{name}": 1e6 for name in ("generate", "train", "sync", "reward")
    }
    metrics |= {f"rewards/{'long_name_of_a_reward_' * 3}/exceptions": 1e9}
    held_out = {f"eval/{name}": value for _, name, _ in EVALUATION_COLUMNS}
    prompt = Prompt(0, (1,), "word " * 400)
    rollout = Rollout(prompt, (1,), (0.0,), "stop", 1, "x" * 3000)
    scored = [ScoredRollout(rollout, {f"reward_{i}": value for i in range(30)}, value)] * 2
    calls = (
        ("step", 10**9, metrics),
        ("evaluation", 10**9, held_out),
        ("completions", 1, completion_rows(1, scored, [value, -value])),
    )
    shown = lines(*calls, terminal=terminal, columns=columns, overrides=("run.max_steps=1000000000",))
    assert len(shown) > 10 and max(map(len, shown)) <= min(columns if terminal else 100, 100)


def test_a_warning_is_wrapped_at_words_on_a_terminal_and_one_line_in_a_pipe():
    assert lines(("message", WARNING)) == [WARNING]
    for columns, width in ((300, 100), (60, 60)):
        shown = lines(("message", WARNING), terminal=True, columns=columns)
        assert "".join(shown).replace(" ", "") == WARNING.replace(" ", "")
        assert PATH in shown[-1].strip()  # a word that is too long stays whole
        assert max(len(line) for line in shown[:-1]) <= width and all(line.startswith("  ") for line in shown[1:])


STEP, SAMPLE = ("step", 1, {"reward": 0.5}), ("evaluation", 1, {"eval/reward": 0.5})
INFO, BAD = ("message", "run folder: runs/grpo"), ("message", "warning: something is wrong")


@pytest.mark.parametrize(
    ("level", "shown"),
    [("debug", [STEP, SAMPLE, INFO, BAD]), ("info", [STEP, SAMPLE, INFO, BAD]), ("warning", [BAD]), ("error", [])],
)
def test_the_log_level_leaves_lines_out(level, shown, monkeypatch):
    expected = [line for call in shown for line in lines(call)]
    assert lines(STEP, SAMPLE, INFO, BAD, overrides=(f"run.log_level={level}",)) == expected
    monkeypatch.setenv("MEGAGRPO_LOG_LEVEL", level)
    assert lines(STEP, SAMPLE, INFO, BAD, overrides=("run.log_level=error",)) == expected


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("output", ["a closed pipe", "a full disk"])
def test_a_run_whose_lines_cannot_be_written_goes_on_and_leaves_nothing_to_flush(
    output, unbuffered, tmp_path, monkeypatch, capsys
):
    reader, pipe = os.pipe()
    os.close(reader)
    with os.fdopen(pipe, "wb", 0) as closed, open("/dev/full", "wb", 0) as full:
        raw = closed if output == "a closed pipe" else full
        stdout = io.TextIOWrapper(raw if unbuffered else io.BufferedWriter(raw), write_through=unbuffered)
        monkeypatch.setattr(sys, "stdout", stdout)
        writer = MetricsWriter(tmp_path, load_config(CONFIG, ["run.trackers=[]"]))
        for line in ("first", "second"):
            writer.message(line)
        writer.close()
        write_output("")  # as `megagrpo.__main__` does at the end of a command
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: console failed and may be incomplete; training continues. ")
