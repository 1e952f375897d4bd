"""`megagrpo verify --precision` finds a layer that FP8 damages, and no other; with that layer in bf16 the run
passes."""

import json

import pytest
import torch
import transformers
from ranks import run_ranks

from megagrpo.__main__ import main
from megagrpo.config import load_config
from megagrpo.families.hf_config import load_hf_config
from megagrpo.proof.verify.precision import batch_of, measure
from tests.e2e import world

RUN = """
model: {path: %s, precision: fp32, fp8_recipe: tensorwise}
data: {train: {source: prompts.jsonl}, chat_template: none}
rewards: {functions: [{function: exact_number}]}
rollout: {max_prompt_length: 40, max_completion_length: 24, mismatch_threshold: 1.2}
"""
LAYERS, DAMAGED = 4, 2
WORDS = [torch.arange(3 + i, 35 + i) * (7 + i) % 120 for i in range(6)]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """A run with one very large element in one layer's MLP: in 8 bits all other elements of its matrix become 0. The
    next matrix ignores that row, so other precisions are unaffected."""
    folder = tmp_path_factory.mktemp("damaged")
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96
    )
    config = transformers.LlamaConfig(
        **sizes, vocab_size=128, initializer_range=0.1, max_position_embeddings=128, tie_word_embeddings=True
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        mlp = model.model.layers[DAMAGED].mlp
        mlp.up_proj.weight[5, 0] = 1e5
        mlp.gate_proj.weight[5] = 0.0
    model.save_pretrained(folder)
    return folder


def errors_of(folder, parallel=None, ranks=1, **model):
    path = folder / "run.yaml"
    path.write_text(RUN % folder)
    config = load_config(
        path,
        [
            f"parallel={json.dumps(parallel or {})}",
            *(f"model.{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in model.items()),
        ],
    )
    plain = config.model_copy(
        update=dict(model=config.model.model_copy(update=dict(fp8_recipe="none", bf16_layers=[])))
    )
    return run_ranks(measure, ranks, config, plain, load_hf_config(folder), folder, batch_of(WORDS))


def test_a_layer_that_eight_bits_damage_is_told_from_those_that_only_get_its_errors(damaged):
    (errors,) = errors_of(damaged)
    own = {(e.layer, e.part): e.activation for e in errors.layers}
    assert own.pop((DAMAGED, "mlp")) > 0.5 and 0.01 < min(own.values()) and max(own.values()) < 0.1
    drift = [e.drift for e in errors.layers if e.part == "mlp"]
    assert 2 * max(drift[:DAMAGED]) < min(drift[DAMAGED:])


def test_a_layer_in_bf16_has_no_error_of_its_own(damaged):
    (errors,) = errors_of(damaged, bf16_layers=[0, DAMAGED], fp8_recipe="tensorwise")
    for e in errors.layers:
        assert (e.activation == e.gradient == 0) == (e.layer in (0, DAMAGED)), e


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "parallel"), [(4, dict(tp=2, pp=2, sequence_parallel=True)), (2, {})], ids=["tp2_sp_pp2", "dp2"]
)
def test_every_layout_finds_the_same_errors(ranks, parallel, damaged):
    (expected,) = errors_of(damaged)
    found, *others = errors_of(damaged, parallel, ranks)
    assert others == [found] * (ranks - 1)
    assert found.num_tokens == expected.num_tokens == sum(len(words) - 4 for words in WORDS)
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert (one.layer, one.part) == (other.layer, other.part)
        if (one.layer, one.part) == (DAMAGED, "mlp"):  # a tensor-parallel rank without the element has another scale
            assert min(one.activation, other.activation) > 0.5
        else:
            assert one.activation == pytest.approx(other.activation, rel=0.2) and one.gradient == pytest.approx(
                other.gradient, rel=0.2
            )


@pytest.fixture
def run(damaged):
    rows = [dict(prompt=" ".join(map(str, words.tolist())), answer="1") for words in WORDS]
    (damaged / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (damaged / "run.yaml").write_text(RUN % damaged)
    return str(damaged / "run.yaml")


def test_a_run_without_fp8_has_nothing_to_be_measured(run, capsys):
    assert main(["verify", run, "--precision", "model.fp8_recipe=none"]) == 2
    assert "model.fp8_recipe: none computes nothing in FP8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--precision", "--layout", "tp=2"], "--layout: verify with --precision has no such option"),
        (["--fix", "out.yaml"], "--fix: verify without --precision has no such option"),
        (["--precision", "--tokens", "0"], "--tokens: must be a positive number"),
    ],
)
def test_mistakes_on_the_command_line_are_told(words, said, run, capsys):
    assert main(["verify", run, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.full
def test_layers_that_are_too_far_off_stay_in_bf16_in_the_config_that_is_written(tmp_path, capsys):
    words = ["verify", str(world.folder() / "config.yaml"), "--precision", "--tokens", "300"]
    words += ["model.fp8_recipe=tensorwise", "rollout.mismatch_threshold=2"]
    assert main([*words, "--threshold", "0.5", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    by_layer = {
        number: max(e["activation"] for e in layers if e["layer"] == number) for number in {e["layer"] for e in layers}
    }
    better, worse = sorted(by_layer.values())
    threshold, fixed = str((better + worse) / 2), tmp_path / "fixed.yaml"
    (bad,) = (number for number, error in by_layer.items() if error == worse)
    assert main([*words, "--threshold", threshold, "--fix", str(fixed)]) == 0
    printed = capsys.readouterr().out
    assert f"FAIL: layers {bad} are too far off" in printed and printed.rstrip().endswith("pass")
    config = load_config(fixed)
    assert config.model.bf16_layers == [bad] and config.model.fp8_recipe == "tensorwise"
    assert config.rollout == load_config(words[1], words[-1:]).rollout
    assert main([*words, "--threshold", threshold]) == 1
    assert main([*words[:-1], "--threshold", "0.5", "rollout.mismatch_threshold=1.0001"]) == 1
    assert "no layer is too far off, all of them together are" in capsys.readouterr().out
