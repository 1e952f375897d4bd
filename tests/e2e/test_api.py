"""`megagrpo.train` and the run that it returns: one run with Python objects for rewards, data and callbacks, shared by
the tests."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

import megagrpo
from megagrpo.config.basics.yaml_text import flow_text
from megagrpo.records.checkpoints.run_lock import RunLock
from megagrpo.trainer.saving.run_folder import prepare_run_folder
from tests.e2e import world


def config(folder):
    """The world's config as a mapping, without data and rewards, on the shared server."""
    return {
        "defaults": str(world.folder() / "config.yaml"),
        "run": {"output_dir": folder, "name": "from_python"},
        "rollout": {"urls": [world.server()]},
        "rewards": {"workers": 1},
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps: the folder around it, the run, and what it printed."""
    folder = tmp_path_factory.mktemp("api")
    bonus = {"?": 1.0}

    def low_bytes_of_a_closure(completions, answer, **columns):
        assert all(int(each) > 0 for each in answer)
        texts = [completion[0]["content"] if isinstance(completion, list) else completion for completion in completions]
        return [sum(character < "a" for character in text) / max(1, len(text)) * bonus["?"] for text in texts]

    class Notes:
        """A callback as an object with state: appends the step to a file."""

        def __init__(self, file):
            self.file = file

        def on_step_end(self, config, state, control):
            with open(self.file, "a") as file:
                print(state.step, file=file)

    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(1, 5) for b in range(1, 4)]
    run = megagrpo.train(
        config(folder),
        reward_functions=[
            low_bytes_of_a_closure,
            {"function": lambda completions: [0.5] * len(completions), "weight": 0.5},
            "format",
        ],
        dataset=rows,
        eval_dataset=rows[:2],
        callbacks=[Notes(str(folder / "notes"))],
        overrides={"evaluation.steps": 2, "train.learning_rate": 3e-3},
        quiet=True,
    )
    return folder, run


def test_a_run_trains_with_functions_rows_and_a_callback_of_the_caller(trained):
    folder, run = trained
    assert run.folder == folder / "from_python" and list(run.metrics["step"]) == [1, 2]
    assert run.metrics["rewards/low_bytes_of_a_closure/mean"].between(0.01, 1).all()
    assert (
        list(run.metrics["rewards/lambda_function/mean"]) == [0.5, 0.5]
        and (run.metrics["rewards/format/exceptions"] == 0).all()
    )
    assert (folder / "notes").read_text() == "1\n2\n"
    assert (
        list(run.evaluations["step"]) == [0, 2] and "eval/reward" in run.evaluations and "reward" not in run.evaluations
    )
    assert len(run.completions) == 2 * 4 * 4 and set(run.completions["rewards/lambda_function"]) == {0.5}
    assert run.checkpoint == run.folder / "checkpoints" / "step_000002" and run.best_checkpoint is None
    assert "2 steps, reward" in repr(run)


def test_the_run_s_config_names_files_that_train_again(trained):
    folder, run = trained
    loaded = megagrpo.load_run(run.folder)
    assert loaded.config == run.config and run.config.run.name == "from_python"
    first = run.config.rewards.functions[0].function
    assert first.startswith(str(run.folder / "from_python")) and first.endswith(
        "megagrpo_rewards.py:low_bytes_of_a_closure"
    )
    values = run.config.model_dump()
    values["run"] |= {"resume": True, "max_steps": 3}
    again = world.train(folder, *(f"{section}={flow_text(values[section])}" for section in ("run", "data", "rewards")))
    assert again.code == 0, again.err
    assert (
        list(loaded.metrics["step"]) == [1, 2, 3]
        and loaded.metrics["rewards/low_bytes_of_a_closure/mean"].notna().all()
    )
    assert (folder / "notes").read_text() == "1\n2\n3\n"


def test_an_overwritten_run_keeps_the_files_of_both(trained):
    """A new start moves an earlier run aside; the configs of both name files in `from_python`, which stays."""
    folder, run = trained
    config = run.config.model_copy(
        update={"run": run.config.run.model_copy(update={"overwrite": True, "resume": False})}
    )
    lock = RunLock(run.folder)
    before = sorted(path.name for path in (run.folder / "from_python").iterdir())
    prepare_run_folder(config, lock)
    lock.release()
    assert (folder / "from_python.1" / "metrics.jsonl").exists() and not run.folder.joinpath("metrics.jsonl").exists()
    assert sorted(path.name for path in (run.folder / "from_python").iterdir()) == before


# ----------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.full
def test_the_trained_model_responds_is_evaluated_and_exported(tmp_path):
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(8)]
    rewards = f"{world.folder()}/rewards.py:low_bytes"
    run = megagrpo.train(
        config(tmp_path), dataset=rows, reward_functions=rewards, overrides={"train.learning_rate": 3e-3}
    )
    one = run.generate("What is 1 + 2?", temperature=0, max_tokens=8)
    many = run.generate(["What is 1 + 2?", [{"role": "user", "content": "1 + 1?"}]], n=2, temperature=0, max_tokens=8)
    assert isinstance(one, str) and many[0] == [one, one] and len(many) == 2 and many[1][0] == many[1][1]
    assert run.generate(["What is 1 + 2?"], temperature=0, max_tokens=8, checkpoint=None) != [one]
    with pytest.raises(
        megagrpo.ConfigError, match=r"prompts.1: has .* tokens, and the model takes 256, responses included; shorten it"
    ):
        run.generate(["a", "x" * 300])
    out = run.export(tmp_path / "exported")
    assert (out / "config.json").exists() and list(out.glob("*.safetensors"))
    own_server = {"rollout.urls": []}
    result = megagrpo.evaluate(run.config, checkpoint="latest", eval_dataset=rows[:2], overrides=own_server)
    assert 0 < result.metrics["reward"] <= 1 and len(result.responses) == 2
    exported = megagrpo.evaluate(run.config, checkpoint=out, eval_dataset=rows[:2], overrides=own_server)
    assert exported.metrics["reward"] == pytest.approx(result.metrics["reward"], abs=1e-6)


@pytest.mark.full
def test_two_ranks_save_and_stop_at_ctrl_c_and_resume(tmp_path, request):
    # a worker of pytest-xdist ignores the signal
    request.addfinalizer(
        partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    )
    arguments = dict(dataset=[{"prompt": "1 + 1?", "answer": "2"}] * 4, ranks=2)
    made = config(tmp_path) | {"rewards": {"functions": [{"function": f"{world.folder()}/rewards.py:low_bytes"}]}}
    metrics = tmp_path / "from_python" / "metrics.jsonl"

    def interrupt():
        world.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, "first step")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        megagrpo.train(made, **arguments, overrides={"run.max_steps": 1000})
    thread.join()
    run = megagrpo.load_run(tmp_path / "from_python")
    steps = len(run.metrics)
    assert (
        run.checkpoint.name == f"step_{steps:06d}" and "dp 2" in (run.folder / "from_python" / "train.log").read_text()
    )
    resumed = megagrpo.train(made, **arguments, overrides={"run.max_steps": steps + 1}, resume=True)
    assert list(resumed.metrics["step"]) == list(range(1, steps + 2))


@pytest.mark.full
def test_a_run_saves_and_ends_when_its_caller_is_killed(tmp_path):
    made = config(tmp_path) | {"rewards": {"functions": [{"function": f"{world.folder()}/rewards.py:low_bytes"}]}}
    made["run"] = {"output_dir": str(tmp_path), "name": "from_python", "max_steps": 1000}
    caller = subprocess.Popen(
        [sys.executable, "-c", f"import megagrpo; megagrpo.train({made!r})"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    metrics = tmp_path / "from_python" / "metrics.jsonl"
    world.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, "first step")
    family = [pid for pid in world.family(caller.pid) if pid != caller.pid]
    caller.kill()
    caller.communicate()
    world.wait_for(lambda: not any(map(world.alive, family)), "end of all processes")
    run = megagrpo.load_run(tmp_path / "from_python")
    assert run.checkpoint is not None and run.checkpoint.name == f"step_{len(run.metrics):06d}"
    assert "stop requested (SIGTERM)" in (run.folder / "from_python" / "train.log").read_text()


@pytest.mark.full
def test_a_run_that_raises_in_a_callback_is_a_training_failure(tmp_path):
    class Fails:
        def on_step_end(self, config, state, control):
            raise ValueError("no more")

    made = config(tmp_path) | {"rewards": {"functions": [{"function": f"{world.folder()}/rewards.py:low_bytes"}]}}
    with pytest.raises(megagrpo.TrainingFailed, match="on_step_end raised ValueError: no more") as error:
        megagrpo.train(made, callbacks=[Fails])
    assert len(megagrpo.load_run(error.value.folder).metrics) == 1 and "no more" in error.value.log.read_text()
