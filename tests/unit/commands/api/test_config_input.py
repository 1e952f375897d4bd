"""The config and the overrides that a function of the API gets."""

from pathlib import Path

import numpy as np
import pytest

from megagrpo.commands.api.inputs.config_input import override_texts, read
from megagrpo.config import ConfigError, RunConfig, load_config
from tests.unit.for_each import for_each

OWN = {
    "model": {"path": "m"},
    "data": {"train": {"source": "org/data"}},
    "rewards": {"functions": [{"function": "format"}]},
}


def test_a_mapping_a_file_and_a_validated_config_are_the_same_config(tmp_path):
    (tmp_path / "own.yaml").write_text(
        "model: {path: m}\ndata: {train: {source: org/data}}\nrewards: {functions: [{function: format}]}\n"
    )
    expected = load_config(tmp_path / "own.yaml", ["run.seed=7"])
    for config in (OWN, tmp_path / "own.yaml", str(tmp_path / "own.yaml"), expected):
        assert read(config, {"run.seed": 7}).validated() == expected == read(config, ["run.seed=7"]).validated()


def test_a_shipped_config_has_a_name():
    quickstart = read("megagrpo:quickstart", ["run.max_steps=2"])
    assert quickstart.validated().run.max_steps == 2 and quickstart.file == "megagrpo:quickstart"
    with pytest.raises(ConfigError, match="no shipped config megagrpo:quickstrt; did you mean megagrpo:quickstart"):
        read("megagrpo:quickstrt")


def test_a_mapping_extends_a_config_and_counts_paths_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("{}\n")
    made = read(
        {"defaults": "megagrpo:quickstart", "data": {"train": {"source": "rows.jsonl"}, "eval": None}}
    ).validated()
    assert made.data.train.source == str(tmp_path / "rows.jsonl") and made.run.max_steps == 8 and made.data.eval is None


def test_plain_data_of_other_libraries_becomes_plain(tmp_path):
    given = OWN | {"run": {"output_dir": tmp_path, "seed": np.int64(3)}, "train": {"learning_rate": np.float64(1e-3)}}
    made = read(given, {"train.adam_beta2": np.float32(0.5), "run.name": "ab"}).validated()
    assert (made.run.output_dir, made.run.seed, made.train.learning_rate) == (str(tmp_path), 3, 1e-3)
    assert made.train.adam_beta2 == 0.5 and made.run.name == "ab"


def test_values_of_overrides_survive_the_command_line():
    values = {
        "data.system_prompt": 'a "quoted": text\nof two lines # and {braces}',
        "data.chat_template": None,
        "run.seed": 5,
    }
    made = read(OWN | {"data": OWN["data"] | {"chat_template": "none"}}, values).validated()
    assert (
        made.data.system_prompt == values["data.system_prompt"]
        and made.data.chat_template is None
        and made.run.seed == 5
    )
    assert override_texts({"train.learning_rate": 1e-5, "run.resume": True}) == (
        "train.learning_rate=1.0e-05",
        "run.resume=true",
    )
    for choice in (True, False, "outcome"):  # a boolean or a text
        (text,) = override_texts({"algorithm.dynamic_sample": choice})
        assert read(OWN, [text]).validated().algorithm.dynamic_sample is choice or choice == "outcome"


def test_a_config_made_in_python_is_a_file_for_a_command(tmp_path):
    # paths as they are
    made = RunConfig.model_validate(OWN | {"run": {"output_dir": "runs"}, "lora": {"rank": 4, "adapter_path": "a"}})
    saved = load_config(read(made).words(lambda: tmp_path)[0])
    assert (saved.run.output_dir, saved.lora.adapter_path) == (str(Path.cwd() / "runs"), str(Path.cwd() / "a"))
    settings = read(OWN | {"run": {"output_dir": str(tmp_path)}}, ["run.seed=9"])
    file, *overrides = settings.words(lambda: tmp_path, ["run.max_steps=3"])
    assert overrides == ["run.seed=9", "run.max_steps=3"]
    assert load_config(file, overrides) == settings.validated(["run.max_steps=3"])


def test_a_file_of_the_user_stays_where_it_is(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("model: {path: m}\n")
    assert read(file).words(lambda: pytest.fail("nothing is written")) == [str(file)]


def test_all_problems_of_a_mapping_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        read({"model": {"pth": "m"}, "train": {"learning_rate": "fast"}}, ["run.seed=-1"]).validated()
    assert str(error.value).startswith("config: ")
    keys = {key for problem in error.value.problems for key in problem.keys}
    assert {"model.pth", "model.path", "train.learning_rate", "run.seed", "data.train"} <= keys


@for_each(
    ("config", "overrides", "message"),
    [
        (
            3,
            (),
            "config: must be a YAML file, a shipped config such as megagrpo:quickstart, a mapping or a RunConfig .got "
            "int",
        ),
        ("nowhere.yaml", (), "nowhere.yaml: cannot read it: No such file"),
        ({"defaults": 3}, (), "config: `defaults:` must name one file"),
        ({"defaults": "nowhere.yaml"}, (), "nowhere.yaml: cannot read it"),
        (
            OWN | {"rewards": {"functions": [{"function": len}]}},
            (),
            "rewards.functions.0.function: a builtin_function_or_method is not",
        ),
        (OWN | {"run": {"seed": object()}}, (), "run.seed: a object is not a value of a config; write numbers"),
        (OWN, {"run.seed": {1, 2}}, "run.seed: a set is not a value of a config"),
        (OWN, "run.seed=1", "overrides: must be a mapping"),
        (OWN, [("run.seed", 1)], "overrides: must be a mapping"),
        (OWN, ["run.seed"], "run.seed: not an override"),
    ],
)
def test_what_is_no_config_is_an_error_that_names_it(config, overrides, message):
    with pytest.raises(ConfigError, match=message):
        read(config, overrides).validated()
