"""Text means what was typed: texts and paths pass through YAML, the command line and Python unchanged."""

import re
import shlex
import string
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megagrpo.commands.api.inputs.config_input import read
from megagrpo.commands.arguments.config_arguments import load, overrides
from megagrpo.commands.parser import parse
from megagrpo.config import ConfigError, RunConfig, absolute_override, load_config, override_text, save_resolved
from megagrpo.config.basics.paths import PATHS, anchored
from megagrpo.config.basics.yaml_text import block_text, parse_yaml
from megagrpo.config.json_schema import config_schema
from megagrpo.config.key_table import fields, section_of
from megagrpo.config.overrides import holds_texts, is_text, read_override, types_of
from tests.unit.for_each import for_each


def concrete(key: str) -> str:
    """A key with an index and a name for N and NAME."""
    return key.replace(".N.", ".0.").replace(".NAME.", ".mine.")


SMALLEST = "model: {path: m}\ndata: {train: {source: a.jsonl}}\nrewards: {functions: [{function: exact_number}]}\n"
SCHEMA = jsonschema.Draft202012Validator(config_schema())
PLAIN = [key for key, field in fields(RunConfig) if section_of(field.annotation) is None]
TEXTS = [key for key in PLAIN if is_text(types_of(RunConfig, concrete(key)))]
LISTS = [key for key in PLAIN if any(map(holds_texts, types_of(RunConfig, concrete(key))))]
WORDS = [
    *("", " ", " a ", "#1 rule", "after #### please", "a: b", "null", "\\null", "\\\\null", "~", "Null"),
    *("yes", "no", "off", "on", "y", "n", "True", "NO", "1e3", "1_000", "0o7", "0x1f", "012", "12:30:45"),
    *("2024-01-01", "2024-01-01T10:00:00Z", ".nan", ".inf", "-", "--x", "=", "a=b", "<<", "'quoted'", '"quoted"'),
    *("'", '"', "{a: b}", "[a]", "{", "[", "}", "]", ",", "%d", "@x", "&a", "*a", "!!str a", "|", "> x", "? x", "- "
        "a", "`x`"),
    *("a\nb", "\n", "a\n", "\ta", "a\t#b", "\r\n", "\x85", "\u2028", "\ufeff", "é 字", "🙂", "\\", "$HOME", "${HOME}"),
    *("bar_%r.bin", "me@example.com", "a|b", "pink & green", "epoch=999-step=8.ckpt", "1_1_1", "a*", "x:\\y", "--a.b=c"),
    *("~/a", "a//b/", "a b.jsonl", "Qwen/Qwen3", "{{ messages }}", "a.py:f", "model:m", "package:a", "http://h:1", "x" * 300),
]  # fmt: skip
texts = (
    st.sampled_from(WORDS)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
    | st.text(string.printable)
)
texts |= st.text("#: '\"\\\n-{}[],&*!|>%@`~=null0123eE_.", max_size=12)


def fuzz(examples: int):
    """Settings for the same cases in every run."""
    return settings(
        max_examples=examples, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(SMALLEST)
    return tmp_path


def nested(key: str, value: object) -> dict:
    for part in reversed(key.split(".")):
        value = [value] if part == "0" else {part: value}
    return value


def expected(key: str, text: object) -> object:
    """What the one rule of paths makes of a text at a key."""
    pattern = re.sub(r"\.(N|NAME)(?=\.|$)", ".*", key)
    resolve = PATHS.get(pattern) or PATHS.get(f"{pattern}.*")
    if resolve is None:
        return text
    return [resolve(inside, Path.cwd()) for inside in text] if isinstance(text, list) else resolve(text, Path.cwd())


def from_file(key: str, value: object) -> object:
    """The value at a key of a YAML file in the current folder that holds it."""
    text = block_text(nested(key, value))
    assert yaml.safe_load(text) == parse_yaml(text, "file")  # YAML 1.1 and 1.2 agree
    found = anchored(parse_yaml(text, "file"), Path())
    for part in key.split("."):
        found = found[0 if part == "0" else part]
    return found


def test_the_keys_of_text_are_many():
    some = set(
        "model.path data.system_prompt run.name rewards.functions.N.function run.wandb.mode rollout.placement".split()
    )
    assert len(TEXTS) > 70 and some <= set(TEXTS) and {"run.trackers", "data.columns", "rollout.urls"} <= set(LISTS)
    others = {key: str(field.annotation) for key, field in fields(RunConfig) if key in set(PLAIN) - {*TEXTS, *LISTS}}
    assert [
        key for key, kind in others.items() if "str" in kind.replace("dict[str, typing.Any]", "") or "Literal" in kind
    ] == ["algorithm.loss_args", "rollout.logit_bias", "rollout.structured_outputs", "evaluation.sets"]


@fuzz(400)
@given(st.sampled_from(TEXTS), texts)
@example("data.system_prompt", "Put the final answer after #### please")
@example("run.output_dir", "/data/run #3")
def test_any_text_passes_through_yaml_and_the_command_line(key, text):
    name = concrete(key)
    if key in LISTS and text.startswith("["):  # on the command line this is a list
        assert from_file(name, text) == expected(key, text)
        return
    from_word = read_override(override_text(name, text))
    assert from_word == (name, expected(key, text)) and from_file(name, text) == expected(key, text)
    if not re.fullmatch(r"\\*null", text):  # the one text with another meaning, at keys that may be empty
        assert override_text(name, text) == f"{name}={text}"


@fuzz(150)
@given(st.sampled_from(LISTS), st.lists(texts, max_size=3))
def test_any_texts_of_a_list_or_mapping_pass_too(key, listed):
    name = concrete(key)
    value = {text: text for text in listed} if key.endswith(("columns", "tags")) and "wandb" not in key else listed
    assert read_override(override_text(name, value)) == (name, expected(key, value))
    assert from_file(name, value) == expected(key, value)


def test_elements_of_a_list_are_text_without_quotes(here):
    words = [
        "run.wandb.tags=[1e3, off, 007, null, 'a # b', \"c, d\"]",
        "data.columns={1: yes, b: 1:30}",
        "rewards.functions.0.function=a.py:f",
    ]
    config = load_config("run.yaml", words)
    assert config.run.wandb.tags == ["1e3", "off", "007", "null", "a # b", "c, d"] and config.data.columns == {
        "1": "yes",
        "b": "1:30",
    }
    assert config.rewards.functions[0].function == f"{here}/a.py:f"
    assert load_config("run.yaml", ["lora.target_modules=[q_proj, v_proj]"]).lora.target_modules == ["q_proj", "v_proj"]
    assert load_config("run.yaml", ["lora.target_modules=all-linear"]).lora.target_modules == "all-linear"


def test_values_of_other_types_are_yaml(here):
    words = [
        "run.seed=7 ",
        "rewards.functions.0.args={a: 1, b: '#'}",
        "rewards.functions.0.args.c=off",
        "data.eval={source: '1e3'}",
    ]
    config = load_config("run.yaml", [*words, "rewards.functions.0.args.d=1e3"])
    assert config.run.seed == 7 and config.rewards.functions[0].args == {"a": 1, "b": "#", "c": "off", "d": 1000.0}
    assert config.data.eval.source == "1e3"


@fuzz(12)
@given(texts)
@example("".join(WORDS))
def test_a_command_reads_the_text_and_resolved_yaml_holds_it_for_every_reader(tmp_path_factory, text):
    folder = tmp_path_factory.getbasetemp() / "text"
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(SMALLEST)
    keys = {
        "data.system_prompt": text,
        "run.wandb.project": text,
        "data.prompt_column": text,
        "rewards.functions.0.args.x": text,
    }
    words = [override_text(key, value) for key, value in keys.items()]
    config = load(parse(["train", str(folder / "run.yaml"), *words, f"run.output_dir={folder}"]))
    assert read(str(folder / "run.yaml"), keys | {"run.output_dir": folder}).validated() == config
    found = (
        config.data.system_prompt,
        config.run.wandb.project,
        config.data.prompt_column,
        config.rewards.functions[0].args["x"],
    )
    assert found == (text, text, text, text)
    written = save_resolved(config, folder)
    assert load_config(written) == config
    values = yaml.safe_load(written.read_text())
    assert values == config.model_dump() and values["data"]["system_prompt"] == text
    assert list(SCHEMA.iter_errors(values)) == []


def test_a_job_script_hands_the_text_on(here):
    words = [f"data.system_prompt={''.join(WORDS)}", "run.wandb.tags=[a b, 'c']", "data.train.source=~/x.jsonl"]
    passed = overrides(parse(["train", "run.yaml", *words]))
    script = f"printf '%s\\0' {' '.join(map(shlex.quote, passed))}"
    out = subprocess.run(["bash", "-c", script], capture_output=True, cwd="/").stdout.decode().split("\0")[:-1]
    assert load_config("run.yaml", out) == load_config("run.yaml", words)
    assert out == [*words[:2], f"data.train.source={Path.home()}/x.jsonl"]


@for_each("word", ["off", "no", "yes", "on", "n", "1_000", "1e3", "12:30:45", "2024-01-01", "0o7", "~", "null", "="])
def test_what_yaml_1_1_reads_otherwise_is_written_in_quotes(here, word):
    config = load_config("run.yaml", [f"data.columns={{{word!r}: {word!r}}}", f"run.output_dir={here}"])
    assert yaml.safe_load(save_resolved(config, here).read_text())["data"]["columns"] == {word: word}


# ---------------------------------------------------------------------------------------------------------------- paths

ODD_PATHS = {
    "x": "{here}/x",
    "./x": "{here}/x",
    "../x": "{above}/x",
    "a/b/../x/": "{here}/a/x",
    "a//b": "{here}/a/b",
    "/abs//x/": "/abs/x",
    "~/x": "{home}/x",
    "a b #3/é 字": "{here}/a b #3/é 字",
    "$HOME/x y": "{here}/$HOME/x y",
    "null.d/x": "{here}/null.d/x",
}


@for_each("typed", ODD_PATHS)
@for_each("key", PATHS)
def test_every_key_of_type_path_follows_one_rule_from_a_file_the_command_line_and_python(
    tmp_path, monkeypatch, key, typed
):
    here, folder = tmp_path, tmp_path / "cfg"
    monkeypatch.chdir(here)
    folder.mkdir()
    ending = {"data.train.source": ".jsonl", "data.eval.source": ".jsonl", "evaluation.sets.*.source": ".jsonl"}.get(
        key, ""
    )
    text = (
        f"{typed.rstrip('/')}.py:f"
        if PATHS[key].__name__ == "_function"
        else typed + ending
        if ending and typed[-1] != "/"
        else typed
    )
    # names of the hub, if there is no such folder
    if PATHS[key].__name__ == "_folder_or_name" and typed in ("x", "null.d/x"):
        (folder / typed).mkdir(parents=True)
        (here / typed).mkdir(parents=True)
    name = key.replace(".*.", ".0." if "sets" not in key else ".mine.").removesuffix(".*")
    value = [text] if key.endswith(".*") else text

    def at(base: Path) -> object:
        path = ODD_PATHS[typed].format(here=base, above=base.parent, home=Path.home())
        path = path + text[len(typed.rstrip("/")) :] if text != typed else path
        return [path] if key.endswith(".*") else path

    (folder / "own.yaml").write_text(block_text(nested(name, value)))
    found = anchored(parse_yaml((folder / "own.yaml").read_text(), "own"), folder)
    for part in name.split("."):
        found = found[0 if part == "0" else part]
    assert found == at(folder)
    word = override_text(name, value)
    assert read_override(word) == (name, at(here))
    elsewhere = absolute_override(word)
    monkeypatch.chdir("/")
    assert read_override(elsewhere) == (name, at(here))


def test_a_name_of_the_hub_is_a_folder_where_one_exists_beside_the_file_or_in_the_current_folder(here, monkeypatch):
    (here / "cfg" / "org").mkdir(parents=True)
    (here / "cfg" / "run.yaml").write_text(SMALLEST.replace("path: m", "path: org/name"))
    assert load_config("cfg/run.yaml").model.path == "org/name"
    (here / "org" / "name").mkdir(parents=True)
    assert load_config("cfg/run.yaml").model.path == f"{here}/org/name"
    (here / "cfg" / "org" / "name").mkdir()
    assert load_config("cfg/run.yaml").model.path == f"{here}/cfg/org/name"
    assert load_config("cfg/run.yaml", ["model.path=org/name"]).model.path == f"{here}/org/name"


def test_a_folder_whose_name_is_not_utf_8_is_named(here):
    folder = here / "a\udcff"
    folder.mkdir()
    (folder / "run.yaml").write_text(SMALLEST)
    with pytest.raises(
        ConfigError, match=r"data.train.source: '.*a\\udcff/a.jsonl' contains a lone surrogate, .*; rename it in UTF-8"
    ):
        load_config(folder / "run.yaml")


def test_defaults_and_the_config_itself_may_be_in_the_home_folder(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here / "home"))
    (here / "home").mkdir()
    (here / "home" / "base.yaml").write_text(SMALLEST)
    (here / "own.yaml").write_text("defaults: ~/base.yaml\n")
    assert load_config(here / "own.yaml") == load_config("~/base.yaml") == load_config("own.yaml")
    assert load_config(here / "own.yaml").data.train.source == f"{here}/home/a.jsonl"


@for_each(
    ("content", "message"),
    [
        (b"\xef\xbb\xbf" + SMALLEST.encode(), None),
        (SMALLEST.replace("\n", "\r\n").encode(), None),
        (SMALLEST.encode("utf-16"), r"run.yaml: not a text file in UTF-8 \(byte 0\); save it in UTF-8"),
        (SMALLEST.encode() + b"run:\n\tname: a\n", r"line 5, column 1: not valid YAML: .*; indent with spaces"),
        (SMALLEST.encode() + b"run: {name: 2024-01-01}", None),
        (SMALLEST.encode() + b"run: {seed: 1_000}", None),
        (SMALLEST.encode() + b"run: {seed: 12:30:45}", r"run.seed: must be an integer \(got '12:30:45'\)"),
        (SMALLEST.encode() + b"run: {seed: .nan}", r"run.seed: must be a finite number \(got nan\)"),
        (SMALLEST.encode() + b"algorithm: {importance_correction: off}", None),
        (
            SMALLEST.encode() + b"algorithm: {importance_correction: false}",
            r"\(got False\); did you mean 'off', in quotes\?",
        ),
        (SMALLEST.encode() + b"data: {}", r"duplicate key 'data'; remove one"),
        (SMALLEST.encode() + b"run: {name: a, 'name': b}", r"duplicate key 'name'; remove one"),
    ],
)
def test_files_that_editors_and_people_write_are_read_or_named(here, content, message):
    (here / "run.yaml").write_bytes(content)
    if message is None:
        assert load_config("run.yaml").model.path == "m"
    else:
        with pytest.raises(ConfigError, match=message):
            load_config("run.yaml")


def test_a_mapping_read_by_yaml_1_1_names_the_choice():
    config = yaml.safe_load(SMALLEST + "algorithm: {importance_correction: off}\n")
    with pytest.raises(
        ConfigError, match=r"algorithm.importance_correction: .* \(got False\); did you mean 'off', in quotes\?"
    ):
        read(config).validated()
    with pytest.raises(ConfigError, match=r"data.system_prompt: must be a string \(got 3\); put it in quotes"):
        read(config, {"data.system_prompt": 3})
