"""Rollouts in FP8: the servers' options, conflicting settings, and the effect on the plan."""

import json
from pathlib import Path

import pytest

from megagrpo.config import ConfigError, load_config
from megagrpo.engine.servers import serving
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.planner import plan
from megagrpo.planner.costs.engine_memory import ServerMemory
from megagrpo.planner.costs.gpu_specs import GPUS
from megagrpo.planner.costs.shapes import num_parameters
from megagrpo.planner.costs.workload import Lengths
from megagrpo.planner.times.step_times import step_times

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
CORRECTED = "algorithm.importance_correction=token_truncate"
LLAMA = dict(model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
LLAMA |= dict(intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=False)
MODEL = parse_hf_config(LLAMA)


def config(kind="fp8_per_channel", *overrides):
    return load_config(QUICKSTART, [f"rollout.quantization={kind}", CORRECTED, *overrides])


def launched(tmp_path, config, **options):
    """The command line of the first server."""
    dtype = serving.engine_dtype(config.rollout.quantization, config.model.precision)
    return serving.make_launcher(config, tmp_path, tmp_path, dtype, **options)._command(8000)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.importance_correction=off"],
            "fp8_per_channel samples .*importance_correction is off; set the correction to token_truncate",
        ),
    ],
)
def test_what_does_not_go_with_rollouts_in_fp8_is_refused(overrides, message):
    config()
    load_config(QUICKSTART, [*overrides, "rollout.quantization=none"])
    with pytest.raises(ConfigError, match=message):
        config("fp8_per_channel", *overrides)


@pytest.mark.parametrize("kind", ["fp8_per_tensor", "fp8_per_block", "fp8_per_channel"])
def test_servers_are_told_to_quantize_and_get_bfloat16_to_do_it_from(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(serving.device, "visible_gpus", lambda: ["0", "1"])
    command = launched(tmp_path, config(kind, "model.precision=fp32"))
    assert command[command.index("--quantization") + 1] == kind and command[command.index("--dtype") + 1] == "bfloat16"
    plain = launched(tmp_path, config("none", "model.precision=fp32"))
    assert "--quantization" not in plain and plain[plain.index("--dtype") + 1] == "float32"


@pytest.mark.parametrize("kind", ["fp8_per_tensor", "fp8_per_block"])
def test_without_gpus_servers_quantize_by_channel_alone(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(serving.device, "visible_gpus", lambda: None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert "fp8_per_channel" in launched(tmp_path, config())
    with pytest.raises(
        ValueError, match=rf"rollout\.quantization: {kind} needs a GPU in vLLM, .* set it to none or fp8_per_channel"
    ):
        launched(tmp_path, config(kind))


@pytest.mark.parametrize("kind", ["fp8_per_tensor", "fp8_per_block", "fp8_per_channel"])
def test_without_gpus_servers_quantize_no_experts_and_say_so_before_they_start(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(serving.device, "visible_gpus", lambda: None)
    experts = dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | experts))
    assert "--quantization" not in launched(tmp_path, config("none"))
    with pytest.raises(
        ValueError,
        match=rf"rollout\.quantization: {kind} of a model with experts needs a GPU in vLLM, .* set it to none$",
    ):
        launched(tmp_path, config(kind))
    monkeypatch.setattr(serving.device, "visible_gpus", lambda: ["0"])
    assert kind in launched(tmp_path, config(kind))


def test_the_plan_counts_a_byte_for_each_weight_of_a_block():
    made = {kind: config(kind, "model.precision=bf16") for kind in ("none", "fp8_per_block")}
    outer = 2 * 128256 * 4096
    plain, halved = (ServerMemory.of(made[kind], MODEL).parts()["vllm_weights"] * 2**30 for kind in made)
    assert plain == 2 * num_parameters(MODEL) and halved == num_parameters(MODEL) + outer
    lengths = Lengths(100, 200, 300)
    slow, fast = (step_times(made[kind], MODEL, 8, GPUS["h100"], lengths).seconds["generate"] for kind in made)
    assert 0.6 * slow < fast < 0.95 * slow
    texts = [dict(plan(made[kind], 1).rows)["rollout"] for kind in made]
    assert "; linear layers in fp8_per_block" in texts[1] and texts[0] == texts[1].replace(
        "; linear layers in fp8_per_block", ""
    )
