"""`megagrpo init`: the files of a new task, and refusals."""

import json
import os
import re
import subprocess
import sys

import jsonschema
import pytest

from megagrpo.__main__ import main
from megagrpo.commands.arguments.config_arguments import load
from megagrpo.commands.parser import parse
from megagrpo.config.basics.yaml_text import parse_yaml

COMMAND = re.compile(r"^megagrpo (.*?)(?: +#.*)?$", re.MULTILINE)


@pytest.fixture
def task(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my_task"]) == 0
    said = capsys.readouterr().out
    assert "megagrpo check my_task/run.yaml" in said and "megagrpo train my_task/run.yaml" in said
    return tmp_path / "my_task"


def test_a_new_task_has_a_config_data_a_reward_and_a_readme(task):
    assert sorted(path.name for path in task.iterdir()) == [
        *("README.md", "heldout.jsonl", "reward.py", "run.yaml", "schema.json", "train.jsonl"),
    ]
    config = load(parse(["train", "my_task/run.yaml"]))
    assert config.run.name == "my_task" and config.data.train.source == str(task / "train.jsonl")
    assert config.rewards.functions[0].function == f"{task}/reward.py:correct"
    text = (task / "run.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    jsonschema.validate(parse_yaml(text, "run.yaml"), json.loads((task / "schema.json").read_text()))


def test_a_task_of_its_own_is_a_task_of_a_run(task, capsys):
    assert main(["init", "--task", "sums"]) == 0
    listed = re.search("tasks: .*", capsys.readouterr().out)[0]
    (task.parent / "run.yaml").write_text(f"defaults: megagrpo:quickstart\ndata: {{eval: null}}\n{listed}\n")
    (only,) = load(parse(["train", "run.yaml"])).each_task
    assert only.name == "sums" and only.config.data.eval.source == str(task.parent / "sums" / "heldout.jsonl")
    assert only.config.rewards.names == ["correct"] and only.sampling == {"max_tokens": 16}


def test_every_command_of_its_readme_is_one_that_megagrpo_has(task):
    commands = COMMAND.findall((task / "README.md").read_text())
    assert [parse(words.split()).config for words in commands] == ["my_task/run.yaml"] * 4
    assert main(["plan", "my_task/run.yaml"]) == 0


def test_its_rows_differ_and_its_reward_tells_right_from_wrong(task):
    rows = [
        json.loads(line) for name in ("train", "heldout") for line in (task / f"{name}.jsonl").read_text().splitlines()
    ]
    assert len({row["prompt"] for row in rows}) == len(rows) == 69
    assert all(eval(row["prompt"].removeprefix("What is ").rstrip("?")) == int(row["answer"]) for row in rows)
    names: dict = {}
    exec((task / "reward.py").read_text(), names)
    completions = ["It is 5.", [{"role": "assistant", "content": "2 + 3 = 5"}], "6", "", "2 + 5 = 7"]
    for answer in ("5", 5, 5.0, "5.0", "$5"):
        assert names["correct"](completions=completions, answer=[answer] * 5, prompts=[]) == [1.0, 1.0, 0.0, 0.0, 0.0]
    right = [
        ("1,000", 1000),
        ("1000", "1,000"),
        ("-0.5", -0.5),
        ("−4", -4),
        ("2e3", 2000),
        ("1e30", 10**30),
        ("1e+30", 1e30),
        ("7", "007"),
    ]
    right += [
        ("paris, France", "Paris"),
        ("True", True),
        ("(C)", "C"),
        ("1/2", "1/2"),
        ("2024-05-01", "2024-05-01"),
        ("5-3", "3"),
        ("$5.", "5"),
    ]
    wrong = [
        ("10", 10**30),
        ("1", -1),
        ("5-3", -3),
        ("a", "b"),
        ("Parisian", "Paris"),
        ("2", "1/2"),
        ("1", "2024-05-01"),
        ("", "x"),
        ("", 0),
    ]
    for pairs, score in ((right, 1.0), (wrong, 0.0), ([("", None), ("x", ""), ("x", " ")], None)):
        for text, answer in pairs:
            assert names["correct"](completions=[f"so {text}"], answer=[answer]) == [score], (text, answer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("used", "megagrpo init: used exists and is not empty; choose another name, or remove the folder"),
        ("a b", "megagrpo init: 'a b' cannot be the name of a run; use letters, digits, `_`, `-` and `.`"),
        ("used/file/below", "megagrpo init: used/file/below cannot be written: Not a directory; choose another name"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(name, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    assert main(["init", name]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["used", "file"]


@pytest.mark.full
@pytest.mark.slow
def test_a_new_task_passes_its_check_and_trains_at_once(task, tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    for words in (["check", "my_task/run.yaml"], ["train", "my_task/run.yaml", "run.max_steps=1", "data.eval=null"]):
        ended = subprocess.run(
            [sys.executable, "-m", "megagrpo", *words], env=environment, capture_output=True, text=True, timeout=280
        )
        assert ended.returncode == 0, ended.stderr
    (row,) = [json.loads(line) for line in (tmp_path / "runs" / "my_task" / "metrics.jsonl").read_text().splitlines()]
    assert row["step"] == 1 and 0 <= row["reward"] <= 1
