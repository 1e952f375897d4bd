"""Errors of `megagrpo.train`, `plan`, `verify` and `evaluate` that are raised before a process starts."""

import pytest

import megagrpo
from megagrpo.config import ConfigError
from megagrpo.process.scratch import remove_tree

QUICKSTART = "megagrpo:quickstart"


def no_process(monkeypatch):
    monkeypatch.setattr("megagrpo.api.child.run", lambda *a, **k: pytest.fail("a process starts"))


def reward(completions):
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks: must be a positive number .got 0"),
        ({"ranks": True}, "ranks: must be a positive number"),
        ({"dataset": []}, "dataset: has no rows"),
        ({"dataset": [{"question": "1 + 1?"}]}, "dataset: row 0 has no column `prompt`"),
        ({"overrides": {"train.learning_rat": 1}}, "train.learning_rat: unknown key; did you mean train.learning_rate"),
        ({"overrides": {"data.train.source": "./nowhere.jsonl"}}, "data.train.source: no file or folder .*nowhere.jsonl"),
        ({"reward_functions": ["acuracy"]}, "rewards.functions: `acuracy` is not a known reward function; did you mean `accuracy`"),
        ({"reward_functions": ["nowhere.py:f"]}, "no file .*nowhere.py"),
        ({"callbacks": ["nowhere.py:C"]}, "run.callbacks.0: no file .*nowhere.py"),
        (
            {"overrides": {"run.nodes": 2, "rollout.placement": "dedicated"}},
            "run.nodes: 2 nodes, but megagrpo.train starts the ranks of one",
        ),
        ({"overrides": {"parallel.tp": 2}, "ranks": 3}, "parallel"),
    ],
)
def test_a_wrong_run_is_an_error_before_a_process_starts(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    no_process(monkeypatch)
    given = {"reward_functions": reward} | arguments
    given["overrides"] = {"model.path": "Qwen/Qwen3-0.6B"} | given.get("overrides", {})
    with pytest.raises(ConfigError, match=message) as error:
        megagrpo.train(QUICKSTART, **given)
    assert error.value.problems or message.startswith(("ranks", "dataset", "run.nodes"))
    remove_tree(tmp_path / "runs")
