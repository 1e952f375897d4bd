"""User code inside a run: a custom loss, callbacks that save and stop, a tracker, and a reward function that logs."""

import re
from pathlib import Path

import pytest

from tests.e2e import world

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"
CALLBACKS = '''
"""Callbacks and a tracker, which note each call. Watch requests a checkpoint at step 1, and stops the run after step 2."""

import os


class Watch:
    def on_step_begin(self, config, state, control):
        note(config, "begin", state.step)

    def on_step_end(self, config, state, control):
        note(config, "end", state.step, round(state.metrics["reward"], 6))
        control.should_save = state.step == 1
        control.should_training_stop = state.step == 2

    def on_save(self, config, state, control):
        note(config, "save", state.checkpoint.name)

    def on_train_end(self, config, state, control):
        note(config, "over", state.step)


class Fails:
    def on_log(self, config, state, control, logs):
        raise ValueError(f"no use for a loss of {type(logs['loss']).__name__}")


def note(config, *words):
    with open(os.path.join(config.run.output_dir, "notes"), "a") as file:
        print(*words, file=file)


class Notes:
    def __init__(self, run):
        self.path = run.folder / "tracked"

    def completions(self, step, rows):
        self.note("completions", step, len(rows), sum(row["extra"]["logs/length"] == len(row["completion"]) for row in rows))

    def step(self, step, metrics):
        self.note("step", step, metrics["rewards/logs/calls of one"])

    def close(self):
        self.note("close")

    def note(self, *words):
        with self.path.open("a") as file:
            print(*words, file=file)
'''

REWARDS = '''
"""The reward function of the other runs, with a log."""

from rewards import low_bytes


def logs(completions, log_extra, log_metric, **columns):
    log_extra("length", [len(text) for text in completions])
    log_metric("calls of one", 1)
    return low_bytes(completions, None)
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own_code")
    loss = next(
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "def clipped" in block
    )
    (folder / "my_loss.py").write_text(loss)
    (folder / "calls.py").write_text(CALLBACKS)
    (folder / "my_rewards.py").write_text(REWARDS)
    return folder


def test_a_run_trains_with_a_loss_of_ones_own_and_a_callback_saves_and_ends_it(files, tmp_path):
    own = f"algorithm.loss_type={files}/my_loss.py:clipped"
    others = [f"run.trackers=[{files}/calls.py:Notes]", f"rewards.functions.0.function={files}/my_rewards.py:logs"]
    run = world.train(tmp_path, own, f"run.callbacks=[{files}/calls.py:Watch]", "run.max_steps=5", *others)
    assert run.code == 0 and "finished 2 steps (a callback stopped the run)" in run.out, run.err
    assert run.saved == ["step_000001", "step_000002"] and [line["step"] for line in run.metrics] == [1, 2]
    rewards = [round(line["reward"], 6) for line in run.metrics]
    assert (tmp_path / "notes").read_text().splitlines() == [
        "begin 0", f"end 1 {rewards[0]}", "save step_000001",
        "begin 1", f"end 2 {rewards[1]}", "save step_000002", "over 2",
    ]  # fmt: skip
    told = [line for step in (1, 2) for line in (f"completions {step} 16 16", f"step {step} 1.0")]
    assert (run.folder / "tracked").read_text().splitlines() == [*told, "close"]
    assert [line["loss"] for line in run.metrics] == pytest.approx(
        [line["loss"] for line in world.plain().metrics], abs=1e-5
    )
    assert run.metrics[0]["grad_norm"] == pytest.approx(world.plain().metrics[0]["grad_norm"], rel=1e-5)


def test_a_callback_that_raises_ends_the_run_with_its_traceback(files, tmp_path):
    pytest.importorskip("wandb")
    from tests.unit.records.sinks.test_wandb import exit_codes

    trackers = ["run.trackers=[wandb]", "run.wandb.mode=offline"]
    run = world.train(tmp_path, f"run.callbacks=[{files}/calls.py:Fails]", *trackers)
    assert run.code == 1 and len(run.metrics) == 1
    assert [exit_codes(file) for file in run.folder.glob("wandb/offline-run-*/*.wandb")] == [[1]]
    assert run.err.count("Traceback") == 1 and 'raise ValueError(f"no use' in run.err
    said = "on_log raised ValueError: no use for a loss of float ("
    assert f"rank 0 stops: run.callbacks: `{files}/calls.py:Fails`: {said}" in run.err
