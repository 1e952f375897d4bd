"""The JSON schema for editors: it is current, the shipped configs name it and fit it, and it marks mistakes."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from megagrpo.__main__ import main
from megagrpo.config import RunConfig
from megagrpo.config.basics.yaml_text import parse_yaml
from megagrpo.config.json_schema import config_schema, schema_text
from megagrpo.config.key_table import fields, section_of
from tests.unit.for_each import for_each

CONFIGS = Path(__file__).parents[3] / "configs"
SHIPPED = sorted(CONFIGS.rglob("*.yaml"))
SCHEMA = config_schema()


def errors(text: str) -> list[str]:
    """The errors of a config's text, each with its key."""
    found = jsonschema.Draft202012Validator(SCHEMA).iter_errors(parse_yaml(text, "test"))
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def test_the_shipped_schema_is_current():
    """`python docs/config_table.py` updates it."""
    assert (CONFIGS / "schema.json").read_text() == schema_text()
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@for_each("path", SHIPPED)
def test_a_shipped_config_names_the_schema_and_fits_it(path):
    text = path.read_text()
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert named and (path.parent / named[1]).resolve() == CONFIGS / "schema.json"
    assert errors(text) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parallel: {tpp: 2}", "parallel: Additional properties are not allowed ('tpp' was unexpected)"),
        ("num_generations: 4", ": Additional properties are not allowed ('num_generations' was unexpected)"),
        ("parallel: {tp: two}", "parallel.tp: 'two' is not of type 'integer'"),
        ("rollout: {num_generations: 0}", "rollout.num_generations: 0 is less than or equal to the minimum of 0"),
        ("algorithm: {kl_estimator: k9}", "algorithm.kl_estimator: 'k9' is not one of ["),
        ("defaults: [a.yaml]", "defaults: ['a.yaml'] is not of type 'string'"),
    ],
)
def test_a_mistake_is_marked(text, message):
    (error,) = errors(text)
    assert error.startswith(message)


def test_a_file_may_leave_out_what_it_inherits_and_name_a_loss_of_its_own():
    assert errors("defaults: megagrpo:quickstart\nalgorithm: {loss_type: my_loss.py:mine}\ndata: {eval: null}") == []


def test_every_key_has_its_description_and_a_loss_its_names():
    text = schema_text()
    described = [
        field.description
        for _, field in fields(RunConfig)
        if section_of(field.annotation) is None and field.description
    ]
    assert (
        len(described) > 150
        and [words for words in described if json.dumps(words, ensure_ascii=False) not in text] == []
    )
    names = SCHEMA["$defs"]["AlgorithmSection"]["properties"]["loss_type"]["anyOf"][0]["enum"]
    assert {"grpo", "dapo", "cispo"} < set(names) and "FILE.py:NAME" not in names


def test_the_command_prints_or_writes_the_schema(tmp_path, capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    assert main(["schema", "-o", str(tmp_path / "schema.json")]) == 0
    assert (tmp_path / "schema.json").read_text() == schema_text()
    assert main(["schema", "-o", str(tmp_path / "no" / "schema.json")]) == 2
    assert (
        f"--output: {tmp_path}/no/schema.json cannot be written: No such file or directory" in capsys.readouterr().err
    )
