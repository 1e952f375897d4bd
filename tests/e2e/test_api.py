"""`megagrpo.train` and the run that it returns: one run with Python objects for rewards, data and callbacks, shared by the tests."""


import pytest

import megagrpo
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
        reward_functions=[low_bytes_of_a_closure, {"function": lambda completions: [0.5] * len(completions), "weight": 0.5}, "format"],
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
    assert list(run.metrics["rewards/lambda_function/mean"]) == [0.5, 0.5] and (run.metrics["rewards/format/exceptions"] == 0).all()
    assert (folder / "notes").read_text() == "1\n2\n"
    assert list(run.evaluations["step"]) == [0, 2] and "eval/reward" in run.evaluations and "reward" not in run.evaluations
    assert len(run.completions) == 2 * 4 * 4 and set(run.completions["rewards/lambda_function"]) == {0.5}
    assert run.checkpoint == run.folder / "checkpoints" / "step_000002" and run.best_checkpoint is None
    assert "2 steps, reward" in repr(run)


def test_the_run_s_config_names_files_that_train_again_and_resume(trained):
    _, run = trained
    loaded = megagrpo.load_run(run.folder)
    assert loaded.config == run.config and run.config.run.name == "from_python"
    first = run.config.rewards.functions[0].function
    assert first.startswith(str(run.folder / "from_python")) and first.endswith("megagrpo_rewards.py:low_bytes_of_a_closure")
    again = world.command("train", run.folder / "resolved.yaml", "run.max_steps=3", "--resume")
    assert again[0] == 0, again[2]
    assert list(loaded.metrics["step"]) == [1, 2, 3]
