"""Checkpoints of Megatron-LM's GPTModel: its own functions save what we read, and load what we write."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gpt_models
import pytest
import torch
import transformers
from ranks import RankFailed, run_ranks
from safetensors.torch import load_file
from suites import usual
from test_build_and_bridge import run_tool
from test_convert import assert_same_files, back, world
from tiny_families import MODELS, tiny_model

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.families.weight_sources import MEGATRON_LM, resolve_model
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.weights.bridge.conversion import import_hf
from megagrpo.weights.files.data_only import read_metadata
from megagrpo.weights.files.gpt_checkpoint import GptKeys
from tests.family_examples import RELEASES

ALL_EXPERTS = dict(mlp_only_layers=[])
CASES = {  # name: the model, what differs, the layouts that save, export, convert and load
    "llama untied": ("llama untied", {}, dict(tp=2), dict(pp=2), {}, dict(tp=2)),
    "llama tied": ("llama tied", {}, dict(pp=2), {}, dict(tp=2), {}),
    "qwen2": ("qwen2", {}, {}, dict(tp=2), dict(pp=2, vpp=2), dict(pp=2)),
    "qwen3": ("qwen3", {}, dict(tp=2), dict(pp=2, pipeline_layers=[1, 3]), dict(tp=2), {}),
    "qwen3_moe": ("qwen3_moe", ALL_EXPERTS, dict(ep=2), dict(tp=2), dict(pp=2), dict(tp=2, ep=2, etp=1)),
    "qwen3_moe, tensor-parallel experts": (
        "qwen3_moe",
        ALL_EXPERTS,
        dict(tp=2, etp=2),
        dict(ep=2),
        dict(tp=2, ep=2, etp=1),
        dict(pp=2),
    ),
    "qwen3_moe, a dense layer": ("qwen3_moe", {}, dict(ep=2), dict(pp=2), dict(tp=2, etp=2), dict(ep=2)),
    "deepseek_v3": ("deepseek_v3", {}, dict(tp=2), dict(ep=2), dict(pp=2), dict(ep=2)),
    "mixtral": ("mixtral", {}, dict(pp=2), dict(ep=2), {}, dict(ep=2)),
    "gemma2": ("gemma2", {}, dict(tp=2), dict(pp=2), {}, dict(tp=2)),
    "gemma3": ("gemma3", {}, dict(pp=2), {}, dict(tp=2), {}),
    "glm4": ("glm4", {}, {}, dict(tp=2), dict(pp=2), dict(pp=2)),
    "glm": ("glm", {}, dict(tp=2), {}, dict(pp=2), {}),
    "phi3": ("phi3", {}, {}, dict(pp=2), dict(tp=2), dict(tp=2)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with a model of every case in bfloat16, with some float32 tensors in two layers, in several files."""
    for kind, _ in MODELS.values():
        getattr(transformers, f"{kind}ForCausalLM")
    root = tmp_path_factory.mktemp("models")
    run_ranks(make_models, 1, root)
    return root


def make_models(root: Path) -> None:
    for name, (model, changes, *_) in CASES.items():
        kind, extra = MODELS[model]
        built = tiny_model(kind, extra | changes).to(torch.bfloat16)
        for part in ("layers.1.input_layernorm", "layers.3.mlp.down_proj", "layers.3.mlp.experts"):
            for module in (module for path, module in built.named_modules() if path.endswith(part)):
                for parameter in module.float().parameters():
                    parameter.data.mul_(1 + 2.0**-12)  # not representable in bfloat16
        built.save_pretrained(root / name, max_shard_size="150KB")


def padded(layout: Any) -> int:
    """Megatron-LM pads the vocabulary to a multiple of 128 per rank; ours only to a multiple of tp."""
    return 128 * layout.parallel.tp


def save_random(source: Path, out: Path, sizes: dict, **more: Any) -> None:
    hf_config, layout = gpt_models.start(source, sizes)
    model = gpt_models.gpt_model(hf_config, layout, padded(layout))
    numbers = torch.Generator().manual_seed(layout.world_rank)
    with torch.no_grad():
        for name, parameter in model[0].named_parameters():
            if "norm" not in name:
                continue
            # replicated over the tensor-parallel ranks
            numbers.manual_seed(sum(map(ord, name)) + layout.pp_rank)
            parameter.add_(torch.randn(parameter.shape, generator=numbers).to(parameter.dtype) / 10)
    gpt_models.save(out, hf_config, layout, model, 10, **more)
    layout.close()


def there(source: Path, out: Path, sizes: dict) -> None:
    layout = init_layout(ParallelSection(**sizes))
    import_hf(str(source), out, layout, megatron_lm=True)
    layout.close()


def assert_loads_equal(source: Path, one: Path, other: Path, sizes: dict) -> list[int]:
    hf_config, layout = gpt_models.start(source, sizes)
    loaded, iterations = [], []
    for folder in (one, other):
        model = gpt_models.gpt_model(hf_config, layout, padded(layout))
        with torch.no_grad():
            for parameter in model[0].parameters():
                parameter.fill_(-7)
        iterations.append(gpt_models.load(folder, hf_config, layout, model))
        loaded.append(dict(model[0].named_parameters()))
    for name, first in loaded[0].items():
        second = loaded[1][name]
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):  # each pads in its own way
            rows = max(0, min(hf_config.vocab_size - layout.tp_rank * len(first), len(first)))
            first, second = first[:rows], second[:rows]
        assert torch.equal(first, second) and not (first == -7).all(-1).any(), name
    layout.close()
    return iterations


IN_LAYOUTS = ("llama untied", "qwen3_moe, tensor-parallel experts")
# What differs in their tensors: experts beside a dense layer, latent, tied and normed
USUAL = ["qwen3_moe, a dense layer", "deepseek_v3", "gemma2"]
OTHERS = [name for name in CASES if name not in (*USUAL, *IN_LAYOUTS)]


def there_and_back_alone(models: Path, root: Path, names: list[str]) -> list[list[int]]:
    """The steps of the test below for each model, all on this rank."""
    Layout.close = Layout.release  # which keeps the process group for the next step
    iterations = []
    for name in names:
        source, folder = models / name, root / name
        folder.mkdir()
        save_random(source, folder / "gpt", {})
        back(folder / "gpt", folder / "hf", {}, str(source))
        there(folder / "hf", folder / "gpt_again", {})
        iterations.append(assert_loads_equal(source, folder / "gpt", folder / "gpt_again", {}))
        back(folder / "gpt_again", folder / "hf_again", {})
        there(source, folder / "gpt_of_source", {})
        back(folder / "gpt_of_source", folder / "source_again", {})
    return iterations


@pytest.mark.parametrize("names", usual([USUAL, OTHERS], 0), ids=["usual", "others"])
def test_checkpoints_of_other_families_go_there_and_back_on_one_rank(names, models, tmp_path):
    assert run_ranks(there_and_back_alone, 1, models, tmp_path, names) == [[[10, 0]] * len(names)]
    for name in names:
        assert_same_files(tmp_path / name / "hf", tmp_path / name / "hf_again")
        assert_same_files(models / name, tmp_path / name / "source_again")


@pytest.mark.parametrize("name", usual(CASES, [*CASES].index(IN_LAYOUTS[0])))
def test_a_checkpoint_of_megatron_lm_becomes_a_hugging_face_model_and_one_of_megatron_lm_again(name, models, tmp_path):
    """GPTModel loads the same weights from both checkpoints, in another layout; the folders between are the same."""
    *_, saved, exported, converted, loaded = CASES[name]
    source, first, hf, second = models / name, tmp_path / "gpt", tmp_path / "hf", tmp_path / "gpt_again"
    run_ranks(save_random, world(saved), source, first, saved)
    assert (first / MEGATRON_LM).read_text() == "10"
    run_ranks(back, world(exported), first, hf, exported, str(source))
    run_ranks(there, world(converted), hf, second, converted)
    assert set(run_ranks(assert_loads_equal, world(loaded), source, first, second, loaded)[0]) == {10, 0}
    run_ranks(back, 1, second, tmp_path / "hf_again", {})
    assert_same_files(hf, tmp_path / "hf_again")
    run_ranks(there, world(converted), source, tmp_path / "gpt_of_source", converted)
    run_ranks(back, world(exported), tmp_path / "gpt_of_source", tmp_path / "source_again", exported)
    assert_same_files(source, tmp_path / "source_again")


def logits_of_gpt(folder: Path, source: Path, tokens: torch.Tensor) -> torch.Tensor:
    hf_config, layout = gpt_models.start(source, {})
    model = gpt_models.gpt_model(hf_config, layout, padded(layout), torch.float32)
    gpt_models.load(folder, hf_config, layout, model)
    positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    with torch.no_grad():
        logits = model[0](tokens, positions, None)
    layout.close()
    return logits[..., : hf_config.vocab_size]


def logits_of_transformers(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("name", usual(["llama untied", "qwen2", "qwen3_moe", "qwen3_moe, a dense layer"], 3))
def test_transformers_and_gpt_model_compute_the_same_from_the_weights_of_megatron_lm(name, models, tmp_path):
    tokens = torch.arange(24).view(2, 12) * 5 % 127
    run_ranks(save_random, 1, models / name, tmp_path / "gpt", {})
    run_ranks(back, 1, tmp_path / "gpt", tmp_path / "hf", {}, str(models / name))
    expected = run_ranks(logits_of_gpt, 1, tmp_path / "gpt", models / name, tokens)[0]
    found = run_ranks(logits_of_transformers, 1, tmp_path / "hf", tokens)[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory) -> Path:
    """A checkpoint that Megatron-LM has saved of a Qwen3."""
    folder = tmp_path_factory.mktemp("gpt") / "qwen3"
    run_ranks(save_random, 1, models / "qwen3", folder, {})
    return folder


def changed(source: Path, folder: Path, **keys: Any) -> Path:
    """A copy of a model with other values in config.json."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            dict(num_attention_heads=4, num_key_value_heads=4, head_dim=20),
            r"it has num_attention_heads 6 \(config.json implies 4\), num_query_groups 2 \(config.json implies 4\), kv_",
        ),
        (
            dict(num_hidden_layers=3, layer_types=None),
            r"it has num_layers 4 \(config.json implies 3\); name its own mod",
        ),
        (dict(intermediate_size=64), r"linear_fc1.weight has shape \(4, 160, 96\); config.json implies \(4, 128, 96\)"),
        (
            dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"], head_dim=None, hidden_size=144),
            r"it has hidden_size 96 \(config.json implies 144\)",
        ),
    ],
    ids=["heads", "layers", "shape", "family"],
)
def test_a_checkpoint_of_another_architecture_is_refused(keys, message, models, saved, tmp_path):
    """The shapes of all parameters are the same with 4 + 2 * 4 heads of 20 as with 6 + 2 * 2 heads of 24."""
    other = changed(models / "qwen3", tmp_path / "model", **keys)
    with pytest.raises(RankFailed) as error:
        run_ranks(back, 1, saved, tmp_path / "out", {}, str(other))
    assert re.search(message, str(error.value)), str(error.value)[-400:]
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_checkpoint_without_a_key_is_refused(models, tmp_path):
    """Save without the norms of heads, which are not in Megatron-LM's recorded arguments here."""
    run_ranks(save_random, 1, models / "llama tied", tmp_path / "gpt", {})
    other = changed(models / "llama tied", tmp_path / "model", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(RankFailed, match=r"it lacks decoder\.layers\.self_attention\.q_layernorm\.weight"):
        run_ranks(back, 1, tmp_path / "gpt", tmp_path / "out", {}, str(other))


def test_other_numbers_than_those_of_the_training_are_a_warning(models, saved, tmp_path, capfd):
    other = changed(models / "qwen3", tmp_path / "model", rms_norm_eps=1e-3)
    run_ranks(back, 1, saved, tmp_path / "out", {}, str(other))
    said = "was trained with norm_epsilon 1e-06 (config.json implies 0.001); set config.json of "
    assert said in capfd.readouterr().err
    run_ranks(back, 1, saved, tmp_path / "out_again", {}, str(models / "qwen3"))
    assert "warning: " not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("tracker", "folder", "message"),
    [
        ("20", None, "names iter_0000020, which does not exist; copy the checkpoint again"),
        ("newest", None, "holds 'newest', not an iteration; name an iter_\\* folder"),
        ("3", "iter_0000003/mp_rank_00", r"old format \(mp_rank_\*\), one file per rank; load and save it in"),
    ],
    ids=["missing", "no number", "old format"],
)
def test_a_folder_without_the_named_iteration_is_refused(tracker, folder, message, models, tmp_path, capfd):
    checkpoint = tmp_path / "gpt"
    (checkpoint / (folder or "")).mkdir(parents=True)
    (checkpoint / MEGATRON_LM).write_text(tracker)
    assert run_ranks(run_tool, 1, "export", checkpoint, tmp_path / "out", "--model", models / "qwen3") == [2]
    assert re.search(message, capfd.readouterr().err)


def test_the_commands_write_and_read_the_layout_of_megatron_lm(models, saved, tmp_path, capfd):
    assert run_ranks(run_tool, 1, "convert", models / "qwen3", tmp_path / "gpt", "--megatron-lm") == [0]
    assert sorted(file.name for file in (tmp_path / "gpt").iterdir()) == ["hf", MEGATRON_LM, "release"]
    assert run_ranks(run_tool, 1, "export", tmp_path / "gpt", tmp_path / "hf") == [0]
    for file in (models / "qwen3").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "hf" / file.name).read_bytes()
    capfd.readouterr()
    assert run_ranks(run_tool, 1, "inspect", saved) == [0]
    said = capfd.readouterr().out
    assert re.search(r"decoder\.layers\.self_attention\.linear_proj\.weight +bfloat16 +\[4, 96, 144\]", said)
    assert run_ranks(run_tool, 1, "export", saved, tmp_path / "none") == [2]
    assert "has no hf folder with config.json; name the original model with --model" in capfd.readouterr().err


def test_the_architecture_of_a_checkpoint_may_be_a_config_without_weights(models, saved, tmp_path):
    (tmp_path / "config").mkdir()
    shutil.copy(models / "qwen3" / "config.json", tmp_path / "config")
    for name, model in (("alone", tmp_path / "config"), ("known", models / "qwen3")):
        assert run_ranks(run_tool, 1, "export", saved, tmp_path / name, "--model", model) == [0]
    alone, known = (tensors_of(tmp_path / name) for name in ("alone", "known"))
    assert alone.keys() == known.keys()
    assert all(torch.equal(alone[name], known[name].to(alone[name].dtype)) for name in known)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def save_wrapped(source: Path, out: Path, prefix: str, keys: dict[str, str]) -> None:
    """Save as NeMo does: every key has the prefix of the module that wraps GPTModel. `keys` replace other keys."""
    from megatron.core import dist_checkpointing

    hf_config, layout = gpt_models.start(source, {})
    state = gpt_models.gpt_model(hf_config, layout, padded(layout))[0].sharded_state_dict(prefix=prefix)
    for entry in state.values():
        for old, new in keys.items():
            entry.key = entry.key.replace(old, new)
    out.mkdir(parents=True)
    dist_checkpointing.save(state, str(out), async_strategy="mcore")
    layout.close()


OF_MCORE_BRIDGE = {
    "linear_proj.post_layernorm": "post_self_attn_layernorm",
    "linear_fc2.post_layernorm": "post_mlp_layernorm",
}


@pytest.mark.parametrize(
    ("name", "prefix", "keys", "below"),
    usual(
        [
            ("qwen3", "module.", {}, "nemo/weights"),
            ("qwen3_moe, a dense layer", "model.", {}, "nemo"),
            ("glm4", "model.module.", OF_MCORE_BRIDGE, "nemo"),
        ],
        2,
    ),
)
def test_keys_of_programs_that_wrap_gpt_model_are_read(name, prefix, keys, below, models, tmp_path, capfd):
    source = models / name
    run_ranks(save_wrapped, 1, source, tmp_path / "plain", "", {})
    run_ranks(save_wrapped, 1, source, tmp_path / below, prefix, keys)
    for folder, ranks in (("plain", 2), ("nemo", 1)):
        words = ("export", tmp_path / folder, tmp_path / f"{folder}_hf", "--model", source, "--tp", ranks)
        capfd.readouterr()
        assert run_ranks(run_tool, ranks, *words) == [0] * ranks
        (tmp_path / f"{folder}_hf" / "README.md").unlink()  # names the folder
    said = f"no readable arguments of Megatron-LM, so only shapes were compared; make sure that {source} is its model"
    assert said in capfd.readouterr().err
    stored = read_metadata(tmp_path / below).state_dict_metadata
    assert f"{prefix}decoder.final_layernorm.weight" in stored
    assert all(any(new in key for key in stored) for new in keys.values())
    assert_same_files(tmp_path / "plain_hf", tmp_path / "nemo_hf")


def test_a_run_does_not_start_from_a_checkpoint_of_megatron_lm(saved, models, tmp_path):
    """Neither from its folder nor from an iteration; the error is the command that converts it."""
    for folder in (saved, saved / "iter_0000010"):
        with pytest.raises(ValueError, match="is a checkpoint of Megatron, not a Hugging Face folder") as caught:
            resolve_model(str(folder))
        command = re.search("`megagrpo (.*)`", str(caught.value))[1].replace("OUT", f"{tmp_path}/{folder.name}")
        words = command.replace("MODEL", str(models / "qwen3")).split()
        assert run_ranks(run_tool, 1, *words) == [0]
        assert resolve_model(f"{tmp_path}/{folder.name}")


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        (
            "qwen3_moe",
            "self_attention.linear_qkv self_attention.core_attention self_attention.q_layernorm pre_mlp_layernorm "
            "mlp.experts.experts.linear_fc1 mlp.experts.experts.linear_fc2",
        ),
        (
            "deepseek_v3",
            "self_attention.linear_kv_down_proj self_attention.linear_kv_up_proj input_layernorm "
            "self_attention.core_attention mlp.shared_experts.linear_fc1 mlp.linear_fc2",
        ),
    ],
)
def test_the_extra_states_that_transformer_engine_asks_for_are_written(name, modules, models, tmp_path):
    """Its linears, norms and attention ask for one each; Megatron's own layers, as in the other tests, for fewer."""
    run_ranks(there, 2, models / name, tmp_path / "gpt", dict(tp=2, etp=2))
    keys = read_metadata(tmp_path / "gpt" / "release").state_dict_metadata
    found = {key.partition("/")[0] for key in keys}
    prefix = "decoder.layers." if name == "qwen3_moe" else ""
    for module in modules.split():
        assert any(key.startswith(prefix) and key.endswith(f"{module}._extra_state") for key in found), module
    assert "decoder.final_layernorm._extra_state" in found and "embedding.word_embeddings._extra_state" not in found
    if name == "qwen3_moe":
        of_experts = {key for key in keys if key.startswith("decoder.layers.mlp.experts.experts.linear_fc1._extra")}
        assert len(of_experts) == 4 * 8 and f"{prefix}mlp.experts.experts.linear_fc1._extra_state/shard_3.7_4.8" in keys


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("olmo2", "norms over all heads together, blocks without norms before attention and MLP"),
        ("granite", "scales of residual branches, scales of logits"),
        ("hunyuan_v1_dense", "head norms after the rotation"),
        ("ernie4_5_moe", "bias on softmax scores of experts"),
        ("deepseek_v32", "frozen indexer of keys"),
        ("gemma4_text", "factors on the outputs of blocks"),
    ],
)
def test_a_model_with_a_part_that_gpt_model_lacks_is_refused(kind, parts):
    with pytest.raises(ValueError, match=f"GPTModel has no {parts}, as in {kind}; convert without"):
        GptKeys.to_write(parse_hf_config(RELEASES[kind]))
