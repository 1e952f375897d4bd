"""Extra arguments for vLLM's servers: allowed arguments, and the errors for others."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.config import ConfigError, load_config
from megagrpo.config.rules import extra_args as module
from megagrpo.config.rules.extra_args import REFUSED_ARGUMENTS, known_arguments, options_of
from megagrpo.engine.servers.serving import make_launcher
from tests.unit.families.published_configs import MORE, published
from tests.unit.for_each import for_each

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
CORRECTED = "algorithm.importance_correction=token_truncate"
PRINT_ARGUMENTS = (
    "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "actions = make_arg_parser(FlexibleArgumentParser())._actions\n"
    "print(*sorted(name for action in actions for name in action.option_strings))"
)


def load(*words: str, overrides: tuple = ()):
    return load_config(QUICKSTART, [f"rollout.extra_args={list(words)}", *overrides])


@for_each("name", sorted(REFUSED_ARGUMENTS))
def test_arguments_that_the_run_decides_are_refused_by_name(name):
    for words in ([name, "x"], [f"{name}=x"], [name.replace("-", "_").replace("__", "--", 1), "x"]):
        with pytest.raises(ConfigError, match=f"rollout.extra_args: {name} "):
            load(*words)


@for_each(
    ("words", "said"),
    [
        (["-tp", "2"], "--tensor-parallel-size is set by rollout.tp"),
        (["-pp=2"], "--pipeline-parallel-size is set by rollout.pp"),
        (["-dp", "2"], "--data-parallel-size is set by rollout.dp"),
        (["-n", "2"], "--nnodes is set by rollout.nodes_per_server"),
        (["-q", "fp8"], "--quantization is set by rollout.quantization"),
        (["--no-enforce-eager"], "--no-enforce-eager is set by rollout.enforce_eager"),
        (["--lora-modules", "a=b", "--port", "1"], "--port is set by rollout.port"),
        (["--no-such-flag"], r"vLLM .* server has no argument --no-such-flag; correct or remove it"),
        (
            ["--max-num-batched-token", "5"],
            r"vLLM .* has no argument --max-num-batched-token; did you mean --max-num-batched-tokens\?",
        ),
        (["serve"], "vLLM .* server has no argument serve"),
    ],
)
def test_short_negated_and_unknown_arguments_are_refused_by_name(words, said):
    with pytest.raises(ConfigError, match=f"rollout.extra_args: {said}"):
        load(*words)


def test_arguments_that_vllm_knows_reach_its_command_line(tmp_path):
    words = [
        "--max-num-batched-tokens",
        "4096",
        "--seed=-1",
        "--speculative-config.method",
        "ngram",
        "--block_size",
        "16",
        "-O3",
    ]
    command = make_launcher(load(*words), tmp_path, tmp_path, "float32")._command(8000)
    assert command[-len(words) :] == words
    assert options_of(words)["--speculative-config"] == "ngram" and options_of(["--seed", "-1"]) == {"--seed": "-1"}


SYNTHETIC = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}


@for_each(
    ("words", "said"),
    [
        (["--speculative-config", json.dumps(SYNTHETIC)], "rejection_sample_method synthetic changes the sampled"),
        ([f"-sc={json.dumps(SYNTHETIC)}"], "rejection_sample_method synthetic"),
        (["--speculative_config", json.dumps({"rejection-sample-method": "new"})], "rejection_sample_method new"),
        (["--speculative-config.rejection-sample-method", '"synthetic"'], "rejection_sample_method"),
        (
            ["--speculative-config", "{}", "-sc.synthetic_acceptance_rates+", "1"],
            "synthetic_acceptance_rates 1 changes",
        ),
        (["--speculative-config", '{"synthetic_acceptance_length": 2}'], "synthetic_acceptance_length 2 changes"),
        (["--speculative-config", "{method: ngram}"], "is no JSON object"),
        (["--speculative-config", "[1]"], "is no JSON object"),
        (["--speculative-config", "[" * 100_000], "is no JSON object"),
        (["--watermark-config", "{}"], "--watermark-config changes the sampled distribution"),
        (["--trust-remote-code"], "--trust-remote-code would run code of the model's folder"),
        (["--trust_remote_code=true"], "--trust-remote-code would run code of the model's folder"),
        (["--quantization-config.a", "b"], "--quantization-config is set by rollout.quantization"),
    ],
)
def test_drafts_that_change_the_sampled_distribution_are_refused(words, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        load(*words)
    assert len(str(caught.value)) < 1000


def test_drafts_are_refused_beside_the_sampling_that_vllm_refuses():
    exact = ["--speculative-config", json.dumps(SYNTHETIC | {"rejection_sample_method": "block"})]
    assert load(*exact).rollout.extra_args == exact
    for words in (exact, ["-sc.method", "ngram"], ["--spec-method=ngram"]):
        for option in ("rollout.min_p=0.1", "rollout.logit_bias={5: 1.0}"):
            with pytest.raises(ConfigError, match="speculative decoding refuses min_p and logit_bias"):
                load(*words, overrides=(option,))
            assert load(overrides=(option,))


def test_a_multimodal_model_is_served_without_its_towers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MORE["Gemma 3 4B it"]))
    assert "--language-model-only" in make_launcher(load(), tmp_path, tmp_path, "float32")._command(8000)
    (tmp_path / "config.json").write_text(json.dumps(published("Gemma 3 1B it")))
    assert "--language-model-only" not in make_launcher(load(), tmp_path, tmp_path, "float32")._command(8000)
    with pytest.raises(ConfigError, match="--language-model-only is set by the run, which knows whether prompts have"):
        load("--language-model-only")


@pytest.mark.parametrize(
    "words", [["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype=fp8_e4m3"], ["--kv_cache_dtype", "fp8_e5m2"]]
)
def test_a_cache_in_fp8_needs_the_correction_that_quantized_servers_need(words):
    with pytest.raises(ConfigError, match="importance_correction is off; set the correction to token_truncate"):
        load(*words)
    assert load(*words, overrides=(CORRECTED,)).rollout.extra_args == words
    assert load("--kv-cache-dtype", "bfloat16").rollout.extra_args


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_VERSION", "0.33.1"), ("importlib.util.find_spec", lambda name: None)]
)
def test_another_vllm_than_the_one_with_these_arguments_or_none_judges_no_unknown_ones(name, value, monkeypatch):
    monkeypatch.setattr(f"megagrpo.config.rules.extra_args.{name}", value)
    monkeypatch.setattr(module, "known_arguments", known_arguments.__wrapped__)
    assert load("--brand-new", "1").rollout.extra_args == ["--brand-new", "1"]
    with pytest.raises(ConfigError, match=r"--port is set by rollout\.port"):
        load("--port", "1")


def test_every_refused_argument_is_one_of_vllm():
    assert REFUSED_ARGUMENTS.keys() <= known_arguments()


@pytest.mark.full
def test_the_arguments_are_those_of_the_installed_vllm():
    printed = subprocess.run([sys.executable, "-c", PRINT_ARGUMENTS], capture_output=True, text=True, check=True).stdout
    known, real = known_arguments(), set(printed.splitlines()[-1].split())
    assert real - known == {"-h"}
    others = {name for name in known - real if not name.startswith("--no-")}
    assert others <= {"--model-weights", "--mamba-config", "--enable-mm-processor-stats", "--args", "--type-hints"}
