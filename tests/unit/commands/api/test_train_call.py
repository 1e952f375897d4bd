"""`megagrpo.train`, `plan` and `evaluate` around the processes that they start: a small program stands in for
`megagrpo`."""

import ast
import importlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

import megagrpo
from megagrpo.commands.api import child_process, evaluate_call, train_call
from megagrpo.config import ConfigError, load_config
from megagrpo.config.io import shipped_config
from tests.unit.for_each import for_each

QUICKSTART = "megagrpo:quickstart"
PAGE = Path(__file__).parents[4] / "docs" / "python.md"
SMALL = {"model.path": "Qwen/Qwen3-0.6B", "model.precision": "fp32"}
PROGRAM = '''
"""Writes its arguments to the file `called` of the current folder, and does what the file `script` says."""

import json, pathlib, sys


def main(*arguments):
    script = json.loads(pathlib.Path("script").read_text())
    pathlib.Path("called").write_text(json.dumps(arguments, default=str))
    print("trained")
    print("an error", file=sys.stderr)
    return script["exit"]


def evaluate(config, *arguments):
    from megagrpo.commands.api.evaluate_call import Evaluation

    script = json.loads(pathlib.Path("script").read_text())
    pathlib.Path("called").write_text(json.dumps([config.model_dump(), *arguments], default=str))
    if script["exit"]:
        raise SystemExit(script["exit"])
    return Evaluation(script["metrics"], script["by_set"])
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, without a stand-in: a process that starts fails the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(child_process, "call", lambda *arguments, **options: pytest.fail("a process starts"))
    return tmp_path


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A function that sets what the functions do that a process of its own calls instead of training and
    evaluating. It returns a function that reads how they were called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stand_in.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([child_process.PACKAGE_ROOT, str(tmp_path)]))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("stand_in")
    monkeypatch.setattr(train_call, "run_training", module.main)
    monkeypatch.setattr(evaluate_call, "evaluate_here", module.evaluate)

    def does(**script):
        (tmp_path / "script").write_text(json.dumps({"exit": 0} | script))
        return lambda: json.loads((tmp_path / "called").read_text())

    yield does
    sys.modules.pop("stand_in")


def reward(completions):
    return [0.0 for _ in completions]


# ---------------------------------------------------------------------------------------------------------------- train


@for_each(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks: must be a positive number .got 0"),
        ({"ranks": True}, "ranks: must be a positive number"),
        ({"dataset": []}, "dataset: has no rows"),
        ({"dataset": [{"question": "1 + 1?"}]}, "dataset: row 0 has no column `prompt`"),
        ({"overrides": {"train.learning_rat": 1}}, "train.learning_rat: unknown key; did you mean train.learning_rate"),
        (
            {"overrides": {"data.train.source": "./nowhere.jsonl"}},
            r"data.train.source: no file or folder .*nowhere.jsonl",
        ),
        ({"reward_functions": ["acuracy"]}, "`acuracy` is not a known reward function; did you mean `accuracy`"),
        ({"reward_functions": ["int"]}, "write configs/examples/gsm8k_xml/rewards.py:whole_number"),
        ({"reward_functions": ["nowhere.py:f"]}, r"no file .*nowhere.py"),
        ({"callbacks": ["nowhere.py:C"]}, r"run.callbacks.0: no file .*nowhere.py"),
        (
            {"overrides": {"run.nodes": 2, "rollout.placement": "dedicated"}},
            "run.nodes: 2 nodes, but megagrpo train starts the ranks of one",
        ),
        ({"overrides": {"parallel.tp": 2}, "ranks": 3}, "parallel"),
    ],
)
def test_a_wrong_run_is_an_error_before_a_process_starts(arguments, message, here):
    given = {"reward_functions": reward} | arguments
    given["overrides"] = SMALL | given.get("overrides", {})
    with pytest.raises(ConfigError, match=message) as error:
        megagrpo.train(QUICKSTART, **given)
    assert error.value.problems or str(error.value).startswith(("ranks", "dataset", "run.nodes"))


def test_under_torchrun_a_run_is_not_started(here, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=r"megagrpo.train: starts the ranks itself; call it in one process, not under torchrun"
    ):
        megagrpo.train(QUICKSTART)


def test_a_shipped_config_is_trained_with_its_own_file_and_overrides(stand_in, capsys):
    called = stand_in()
    run = megagrpo.train(
        QUICKSTART, reward_functions=reward, overrides=SMALL | {"run.name": "own"}, resume=True, ranks=3
    )
    name, overrides, ranks = called()
    assert name == QUICKSTART and ranks == 3
    config = load_config(name, overrides)
    assert config.run.resume and config.model.path == SMALL["model.path"] and run.folder == Path.cwd() / "runs" / "own"
    assert config.rewards.functions[0].function.startswith(str(run.folder / "from_python"))
    assert sorted(capsys.readouterr().out.splitlines()) == ["an error", "trained"]
    log = (run.folder / "from_python" / "train.log").read_text()
    assert "megagrpo train" in log.splitlines()[0] and "trained\n" in log and "an error\n" in log


def test_a_mapping_is_trained_from_a_file_in_the_run_s_folder_and_may_be_silent(stand_in, capsys):
    called = stand_in()
    run = megagrpo.train(
        {"defaults": QUICKSTART, "model": {"path": SMALL["model.path"]}}, overrides=["run.seed=3"], quiet=True
    )
    file, overrides, ranks = called()
    assert Path(file) == run.folder / "from_python" / "config.yaml" and load_config(file, overrides).run.seed == 3
    assert ranks is None and capsys.readouterr() == ("", "")


def test_the_first_lines_of_the_page_start_a_run(stand_in):
    called = stand_in()
    block = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
    statements = ast.parse(block).body
    start = next(i for i, statement in enumerate(statements) if isinstance(statement, ast.Assign))
    names: dict = {}
    exec(compile(ast.Module(statements[: start + 1], []), "python.md", "exec"), names)  # the last lines need a real run
    config = load_config(*called()[:2])
    assert names["run"].folder == Path.cwd() / "runs" / "shorter" and config.run.max_steps == 6
    assert names["shorter"](["x" * 50]) == [-0.5] and Path(config.data.train.source).exists()
    with pytest.raises(KeyError):  # there are no steps yet
        exec(compile(ast.Module(statements[start + 1 : start + 2], []), "python.md", "exec"), names)


def test_callbacks_of_the_config_stay(stand_in):
    class Own:
        def on_step_end(self, config, state, control):
            pass

    called = stand_in()
    Path("mine.py").write_text("class Mine:\n    pass\n")
    megagrpo.train({"defaults": QUICKSTART, "run": {"callbacks": ["mine.py:Mine"]}}, callbacks=[Own], overrides=SMALL)
    names = load_config(*called()[:2]).run.callbacks
    assert (
        names[0] == f"{Path.cwd()}/mine.py:Mine" and names[1].endswith("megagrpo_callbacks.py:Own") and len(names) == 2
    )


def test_a_failed_run_is_an_error_with_its_folder_its_log_and_its_last_lines(stand_in):
    stand_in(exit=1)
    with pytest.raises(
        megagrpo.TrainingFailed, match=r"exit code 1; the run is in .*/runs/quickstart, all its output in .*train.log"
    ) as error:
        megagrpo.train(QUICKSTART, overrides=SMALL)
    assert (
        error.value.exit_code == 1 and "an error\n" in error.value.output and "an error" in error.value.log.read_text()
    )


def test_a_run_that_has_saved_at_its_time_limit_is_no_error(stand_in):
    stand_in(exit=85)
    assert megagrpo.train(QUICKSTART, overrides=SMALL).folder == Path.cwd() / "runs" / "quickstart"


def test_what_only_the_run_finds_wrong_is_a_config_error_too(stand_in):
    stand_in(exit=2)
    with pytest.raises(ConfigError, match="an error"):
        megagrpo.train(QUICKSTART, overrides=SMALL)


def test_ctrl_c_says_how_to_continue(here, monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(child_process, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        megagrpo.train(QUICKSTART, overrides=SMALL)
    assert (
        capsys.readouterr().err
        == f"stopped; megagrpo.load_run('{here}/runs/quickstart') opens the run, and resume=True continues it\n"
    )


# ----------------------------------------------------------------------------------------------------------------- plan


def test_a_plan_predicts_memory_and_with_a_gpu_seconds(here):
    plan = megagrpo.plan("megagrpo:qwen2.5_7b_1node", world_size=8, gpu="h100")
    assert plan.problems == [] and plan.memory["train"]["total"] > 1 and plan.times.step > 1
    assert "h100" in str(plan).lower() and megagrpo.plan("megagrpo:qwen2.5_7b_1node").times is None
    assert megagrpo.plan("megagrpo:llama3.1_70b_8nodes", world_size=3).problems  # no error: the plan names it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "h1000"}, "gpu: h1000 is not known; choose one of a100"),
        ({"world_size": 0}, "world_size: must be a positive number .got 0"),
        ({"prompt_tokens": 5}, "prompt_tokens: predicted seconds need a kind of GPU; add gpu"),
        ({"overrides": ["train=1"]}, "train: "),
    ],
)
def test_a_wrong_question_for_a_plan_is_an_error(arguments, message, here):
    with pytest.raises(ConfigError, match=message):
        megagrpo.plan(QUICKSTART, **arguments)


# ------------------------------------------------------------------------------------------------------------- evaluate


def test_an_evaluation_has_metrics_and_a_row_per_response(stand_in):
    response = {"prompt_id": 0, "prompt": "a", "completion": "b", "reward": 1.0, "rewards": {"reward": 1.0}}
    called = stand_in(metrics={"reward": 1.0, "hard/reward": 0.0}, by_set={"": [response], "hard": [response]})
    rows = [{"prompt": "a"}]
    result = megagrpo.evaluate(
        load_config(shipped_config(QUICKSTART)),
        checkpoint="latest",
        eval_dataset={"hard": rows},
        reward_functions=reward,
        overrides=SMALL,
    )
    config, folder, checkpoint, adapter = called()
    assert (folder, checkpoint, adapter) == (str(Path.cwd()), "latest", None)
    assert result.metrics == {"reward": 1.0, "hard/reward": 0.0}
    assert list(result.responses["set"]) == ["", "hard"] and list(result.responses["rewards/reward"]) == [1.0, 1.0]
    written = config["evaluation"]["sets"]["hard"]["source"]
    assert not Path(written).exists()  # the files of the call are temporary


def test_an_evaluation_that_fails_is_an_error(stand_in):
    stand_in(exit=1)
    with pytest.raises(megagrpo.CommandFailed, match="megagrpo eval failed with exit code 1"):
        megagrpo.evaluate(QUICKSTART)


def test_the_exit_code_of_a_signal_is_that_of_the_command_line(stand_in):
    stand_in(exit=128 + signal.SIGTERM)
    with pytest.raises(megagrpo.TrainingFailed) as error:
        megagrpo.train(QUICKSTART, overrides=SMALL)
    assert error.value.exit_code == 143
