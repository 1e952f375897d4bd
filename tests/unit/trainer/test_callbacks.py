"""User callbacks: loaded before a run, called on rank 0, with effect on all ranks."""

import re
from pathlib import Path

import pytest
import yaml
from ranks import run_ranks
from tiny_policy import tiny_run

from megagrpo.config import ProblemError, RunConfig
from megagrpo.planner import plan
from megagrpo.platform.parallel.agree import RankError
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.trainer.callbacks import EVENTS, CallbackError, Callbacks, load_callbacks
from tests.rank_fakes import OneRank

PAGE = (Path(__file__).parents[3] / "docs" / "callbacks.md").read_text()
NOTES = """
class Notes:
    def __init__(self):
        self.seen = []

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda config, state, control, **more: self.seen.append((name, state.step, state.checkpoint, dict(state.metrics), more))

    def on_step_begin(self, config, state, control):
        self.seen.append(("on_step_begin", config.run.name, control.should_save))
"""
WISHES = """
class Wishes:
    def on_step_begin(self, config, state, control):
        control.should_save = state.step == 1

    def on_evaluate(self, config, state, control, metrics):
        control.should_training_stop = metrics["reward"] > 0.9


class Fails:
    def on_step_end(self, config, state, control):
        helper = {}
        helper["nothing"]
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "calls.py").write_text(NOTES + WISHES)
    return tmp_path / "calls.py"


def config(*names) -> RunConfig:
    return tiny_run(run=dict(callbacks=list(map(str, names)), name="mine", max_steps=5))


def test_the_keys_of_the_page_and_its_methods_are_those_of_the_code(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_callbacks.py").write_text(code)
    (named,) = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])["run"]["callbacks"]
    run = config(tmp_path / named)
    callbacks = Callbacks(run, OneRank(), load_callbacks(run.run.callbacks))
    callbacks.train_begin(0)
    callbacks.step_end(1, {"reward": 0.9})
    assert not callbacks.control.should_training_stop
    callbacks.step_end(2, {"reward": 0.96})
    assert callbacks.control.should_training_stop
    assert tuple(re.findall(r"^\| `(on_\w+)`", PAGE, re.MULTILINE)) == EVENTS


def test_each_method_sees_step_metrics_and_newest_checkpoint(file, tmp_path):
    run = config(f"{file}:Notes")
    (notes,) = instances = load_callbacks(run.run.callbacks)
    callbacks = Callbacks(run, OneRank(), instances)
    callbacks.train_begin(3, tmp_path / "step_000003")
    callbacks.step_begin()
    callbacks.step_end(4, {"loss": 0.5})
    callbacks.evaluated({"reward": 1.0})
    callbacks.saved(tmp_path / "step_000004")
    callbacks.train_end()
    old, new, loss = tmp_path / "step_000003", tmp_path / "step_000004", {"loss": 0.5}
    assert notes.seen == [
        ("on_train_begin", 3, old, {}, {}),
        ("on_step_begin", "mine", False),
        ("on_step_end", 4, old, loss, {}),
        ("on_log", 4, old, loss, {"logs": loss}),
        ("on_evaluate", 4, old, {"reward": 1.0}, {"metrics": {"reward": 1.0}}),
        ("on_save", 4, new, loss, {}),
        ("on_train_end", 4, new, loss, {}),
    ]


def test_a_wish_for_a_checkpoint_holds_for_one_step_and_a_stop_for_good(file):
    run = config(f"{file}:Wishes")
    callbacks, wishes = Callbacks(run, OneRank(), load_callbacks(run.run.callbacks)), []
    callbacks.train_begin(0)
    for step in range(1, 4):
        callbacks.step_begin()
        callbacks.step_end(step, {})
        wishes.append(callbacks.control.should_save)
    assert wishes == [False, True, False] and not callbacks.control.should_training_stop
    callbacks.evaluated({"reward": 0.95})
    callbacks.step_begin()
    assert callbacks.control.should_training_stop


def test_several_callbacks_run_in_the_order_of_the_list_and_share_one_control(file):
    run = config(f"{file}:Wishes", f"{file}:Notes")
    _, notes = instances = load_callbacks(run.run.callbacks)
    callbacks = Callbacks(run, OneRank(), instances)
    callbacks.step_end(1, {})
    callbacks.step_begin()
    assert notes.seen[-1] == ("on_step_begin", "mine", True)  # the wish of the first


def test_the_state_cannot_be_changed(file):
    (notes,) = instances = load_callbacks((run := config(f"{file}:Notes")).run.callbacks)
    callbacks, states = Callbacks(run, OneRank(), instances), []
    notes.on_step_end = lambda config, state, control: states.append(state)
    callbacks.step_end(1, {"loss": 1.0})
    (state,) = states
    assert state.global_step == state.step == 1 and state.max_steps == run.run.max_steps
    with pytest.raises(AttributeError):
        state.step = 2
    with pytest.raises(TypeError):
        state.metrics["loss"] = 0.0


def _two_ranks(names):
    run = config(*names)
    layout = init_layout(run.parallel)
    callbacks = Callbacks(run, layout, load_callbacks(run.run.callbacks) if layout.world_rank == 0 else None)
    callbacks.train_begin(1)
    callbacks.step_begin()
    first = callbacks.control.should_save, callbacks.control.should_training_stop
    callbacks.evaluated({"reward": 1.0})
    try:
        callbacks.step_end(2, {})
    except (CallbackError, RankError) as error:
        return first, callbacks.control.should_training_stop, type(error).__name__, str(error)


def test_every_rank_obeys_what_rank_0_was_asked_and_ends_when_a_callback_raises(file, capfd):
    one, other = run_ranks(_two_ranks, 2, [f"{file}:Wishes", f"{file}:Fails"])
    line = file.read_text().splitlines().index('        helper["nothing"]') + 1
    said = (
        f"run.callbacks: `{file}:Fails`: on_step_end raised KeyError: 'nothing' ({file}:{line}) after 2 finished steps"
    )
    assert one[:3] == ((True, False), True, "CallbackError") and one[3].startswith(said)
    assert other[:3] == ((True, False), True, "RankError") and other[3].startswith(f"rank 0: CallbackError: {said}")
    printed = capfd.readouterr().err
    assert printed.count("Traceback") == 1 and 'helper["nothing"]' in printed and "trainer/callbacks.py" not in printed


REFUSED = {
    "Nothing:pass": "defines no method that a run calls: on_train_begin",
    "Epochs:def on_epoch_end(self, *a): pass": "defines on_epoch_end, which a run never calls; it calls on_train_begin",
    "Short:def on_step_end(self): "
    "pass": "cannot be called: on_step_end: too many positional arguments; a method takes (self, config",
    "Raises:def __init__(self): self.x = 1 / 0": "cannot be loaded: ZeroDivisionError: division by zero (",
    "Wants:def __init__(self, path): pass": "cannot be loaded: TypeError: ",
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_class_that_cannot_be_used_is_refused_in_one_line(tmp_path, case):
    name, _, body = case.partition(":")
    (tmp_path / "calls.py").write_text(f"class {name}:\n    {body}\n")
    with pytest.raises(ProblemError) as refused:
        load_callbacks(config(f"{tmp_path}/calls.py:{name}").run.callbacks)
    (problem,) = refused.value.problems
    assert str(problem).startswith(
        f"run.callbacks.0: `{tmp_path}/calls.py:{name}` {REFUSED[case]}"
    ) and "\n" not in str(problem)


def test_all_problems_come_at_once(tmp_path):
    (tmp_path / "calls.py").write_text("def function(*a): pass\n")
    with pytest.raises(ProblemError) as refused:
        load_callbacks(
            config(f"{tmp_path}/calls.py:function", f"{tmp_path}/none.py:A", f"{tmp_path}/calls.py:B").run.callbacks
        )
    said = [problem.text.partition("` ")[2] for problem in refused.value.problems]
    assert [problem.keys for problem in refused.value.problems] == [(f"run.callbacks.{i}",) for i in range(3)]
    assert said[0].startswith("is a function, not a class") or said[0].startswith("cannot be loaded")
    assert "no file" in said[1] and "has no function or class `B`" in said[2]


def test_a_callback_of_transformers_runs_as_it_is(tmp_path):
    (tmp_path / "calls.py").write_text(
        "from transformers import TrainerCallback\n\n\nclass Early(TrainerCallback):\n"
        "    def on_log(self, args, state, control, logs=None, **kwargs):\n"
        "        control.should_training_stop = state.global_step >= 2 and logs['loss'] < 1\n        return control\n"
    )
    run = config(f"{tmp_path}/calls.py:Early")
    callbacks = Callbacks(run, OneRank(), load_callbacks(run.run.callbacks))
    callbacks.train_begin(0)
    callbacks.step_end(1, {"loss": 0.5})
    assert not callbacks.control.should_training_stop
    callbacks.step_end(2, {"loss": 0.5})
    assert callbacks.control.should_training_stop


def test_without_callbacks_nothing_is_collective():
    callbacks = Callbacks(config(), layout=None)
    callbacks.train_begin(0)
    callbacks.step_end(1, {})
    assert not callbacks.control.should_save and not callbacks.control.should_training_stop


def test_the_plan_names_a_missing_class(file):
    problems = plan(config(f"{file}:Notse"), 1, has_data=False).problems
    (found,) = (problem.text for problem in problems if problem.keys == ("run.callbacks.0",))
    assert found.startswith(f"{file} defines no `Notse`; did you mean `Notes`?")
