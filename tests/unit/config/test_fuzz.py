"""Any config is accepted or refused with a ConfigError: nothing else is raised, and nothing hangs."""

from __future__ import annotations

import contextlib
import io
import json
import string
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megagrpo.commands.arguments.config_arguments import load
from megagrpo.commands.parser import parse
from megagrpo.config import ConfigError, RunConfig, save_resolved
from megagrpo.config.key_table import fields, section_of
from megagrpo.planner import plan
from megagrpo.trainer.saving.time_limit import check_time_limit, seconds_of

LLAMA = dict(model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
LLAMA |= dict(intermediate_size=128, vocab_size=256, max_position_embeddings=2048, rms_norm_eps=1e-6)
KEYS = [key.replace(".N", ".0").replace("NAME", "hard") for key, _ in fields(RunConfig)]
PLAIN = [
    key.replace(".N", ".0").replace("NAME", "hard")
    for key, field in fields(RunConfig)
    if not section_of(field.annotation)
]

odd_text = (
    st.text(max_size=12)
    | st.text("\x00\ud800\x1b/.:~{}[]$%'\"\\ é🙂", max_size=12)
    | st.text(string.printable, max_size=40)
)
words = st.sampled_from(
    [
        "",
        "none",
        "auto",
        "grpo",
        "~nobody/x",
        "/proc/nope",
        "/etc/passwd",
        "/dev/zero",
        "..",
        "package:",
        "package:a.b",
        "model:",
        "model:/x",
        "http://",
        "http://[",
        "https://a:99999",
        "http://a:1",
        "a.py:f",
        "a/b",
        "a/b/c",
        "{{ x",
        "{% for %}",
        "1:00:00",
        "0:00:00",
        "lo",
        "a" * 300,
        "x/" * 3000,
        "reasoning_gym:gcd",
        "fp8_per_channel",
        "muon",
        "full",
        "external",
        "p2p",
        "all-linear",
        "vllm:x",
    ]
)
numbers = (
    st.integers(-3, 9)
    | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**12, 10**30, 65535, 65536, 99999])
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.sampled_from([1e-30, 1e-300, 1e300, 0.01, 0.5, 1.0, 2.0])
)
scalars = st.none() | st.booleans() | numbers | odd_text | words
names = odd_text | st.sampled_from(KEYS)
values = st.recursive(
    scalars, lambda inside: st.lists(inside, max_size=4) | st.dictionaries(names, inside, max_size=4), max_leaves=8
)
odd_yaml = st.sampled_from(
    [
        "? [a]\n: 1",
        "&a [*a]",
        "!!set {a}",
        "!!binary x",
        "!!python/object:os.system {}",
        "<<: 1",
        "- - -",
        "*a",
        "9" * 5000,
        "[" * 3000,
        "{a: " * 400,
    ]
)
yaml_texts = values.map(lambda value: yaml.safe_dump(value, allow_unicode=True)) | odd_text | odd_yaml
keys = st.sampled_from(PLAIN) | st.sampled_from(PLAIN) | st.sampled_from(KEYS) | odd_text
overrides = st.tuples(keys, (scalars | values).map(json.dumps) | yaml_texts | words).map("=".join) | odd_text


def nested(pairs: list[tuple[str, object]]) -> dict:
    """Build a config file from pairs of dotted keys and values; a key that fits nowhere stays at the top."""
    made: dict = {}
    for key, value in pairs:
        here = made
        *parents, last = [part for part in key.split(".") if part != "0"] or [""]
        for part in parents:
            here = here.setdefault(part, {}) if isinstance(here, dict) else {}
        if isinstance(here, dict):
            here[last] = value
    return made


pairs = st.lists(st.tuples(keys, values), max_size=4)
files = (
    pairs.map(lambda given_pairs: yaml.safe_dump(nested(given_pairs), allow_unicode=True).encode(errors="replace"))
    | yaml_texts.map(lambda text: text.encode(errors="surrogatepass"))
    | st.binary(max_size=60)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    (folder / "a.jsonl").write_text('{"prompt": "a"}\n')
    base = dict(
        model={"path": str(folder / "model")},
        data={"train": {"source": "a.jsonl"}},
        rewards={"functions": [{"function": "int"}]},
    )
    (folder / "base.yaml").write_text(yaml.safe_dump(base | {"run": {"output_dir": str(folder)}}))
    return folder


def accepted_or_refused(folder: Path, arguments: list[str]) -> None:
    """Process a config as a command does before it starts a server or a process group."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            config = load(parse(["train", *arguments]))
            made = plan(config, min(config.parallel.smallest_world, 64), host_memory_gb=31.0)
            assert len(str(made)) < 100_000 and made.as_json()
            if config.run.time_limit is not None:
                assert seconds_of(config.run.time_limit) >= 0
                check_time_limit(config.run.time_limit)
            save_resolved(config, folder / "out")
        except ConfigError as error:
            said = str(error)
            assert said and len(said) < 100_000 and "Traceback" not in said
        except SystemExit as ended:  # --help among the arguments
            assert ended.code == 0


def fuzz(examples: int):
    """Settings for the same cases in every run: no stored examples, and a seed from the test's name."""
    health = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ]
    return settings(max_examples=examples, database=None, derandomize=True, deadline=None, suppress_health_check=health)


def cases(examples: int):
    """Two tests, which share `examples` cases."""

    @fuzz(examples // 2)
    @given(st.lists(overrides, min_size=1, max_size=5))
    def on_the_command_line(folder, given_overrides):
        # A word that argparse reads as its own option is not a config value.
        arguments = [text for text in given_overrides if not text.startswith("-") and "\x00" not in text]
        accepted_or_refused(folder, [str(folder / "base.yaml"), *arguments])

    @fuzz(examples // 2)
    @given(files, st.booleans())
    def in_a_file(folder, content, inherits):
        (folder / "case.yaml").write_bytes((b"defaults: base.yaml\n" if inherits else b"") + content)
        accepted_or_refused(folder, [str(folder / "case.yaml")])

    return {"command line": on_the_command_line, "file": in_a_file}


@pytest.mark.parametrize("where", ["command line", "file"])
def test_any_config_is_accepted_or_refused(folder, where):
    cases(300)[where](folder)


@pytest.mark.full
@pytest.mark.parametrize("where", ["command line", "file"])
def test_any_of_2000_configs_is_accepted_or_refused(folder, where):
    cases(2000)[where](folder)
