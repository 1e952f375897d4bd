"""`megagrpo inspect` shows what a run would load of a model, and lists what a folder holds. tests/distributed inspects
checkpoints of Megatron."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.__main__ import main
from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.weights.blocks.planned_blocks import held_boxes, tensor_shapes
from tests.distributed.tiny_families import EVERY, tiny_model
from tests.unit.for_each import for_each

CASES = ("llama tied", "llama untied", "qwen2_moe", "deepseek_v2 lite", "gpt_oss", "gemma3", "granitemoe", "dots1")
CASES += ("gemma4 small",)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in CASES:
        tiny_model(*EVERY[name]).bfloat16().save_pretrained(folder / name)
    return folder


@pytest.fixture
def model(models, tmp_path):
    """A copy of a Llama with an LM head of its own, in one file."""
    for file in (models / "llama untied").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder, **tensors):
    """Replace tensors of the one file; None removes a tensor."""
    file = folder / "model.safetensors"
    stored = load_file(file) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in stored.items() if tensor is not None}, file)


def set_keys(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def inspected(capsys, *arguments):
    code = main(["inspect", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@for_each("name", CASES)
def test_a_model_is_counted_as_transformers_counts_it(name, models, capsys):
    code, found = inspected(capsys, models / name)
    counted, stored = sum(p.numel() for p in tiny_model(*EVERY[name]).parameters()), found["totals"]["all"]
    facts = found["model"]
    assert facts["parameters"] == counted
    assert facts["file_dtypes"] == {"bfloat16": [stored[0], stored[2]]} and facts["files"] == 1
    problems = ["dots1 cannot be trained: vLLM has no class for it since 0.23"] if name == "dots1" else []
    assert [said.partition(";")[0] for said in found["problems"]] == problems and code == 2 * len(problems)
    assert facts["tied_to"] == (EMBEDDING if name in ("llama tied", "gemma3", "gemma4 small") else None)


@for_each("name", CASES)
def test_the_shapes_of_one_expert_are_those_of_all(name, models):
    config, alone = load_hf_config(models / name), init_layout(ParallelSection())
    built, _ = held_boxes(config, ParallelSection(), 1, alone)
    shapes = tensor_shapes(config, alone)
    alone.close()
    assert shapes == built | ({HEAD: shapes[EMBEDDING]} if config.tied_embeddings else {})


def test_the_report_reads_as_a_user_would(model, capsys):
    change(model, **{"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)})
    assert main(["inspect", str(model)]) == 0
    assert capsys.readouterr().out.splitlines() == REPORT.format(model).splitlines()


REPORT = """\
{}: Hugging Face model
  family       llama (LlamaForCausalLM), 4 layers
  parameters   0.2M
  files        1, tensors: 1 in float32 (16 bytes), 39 in bfloat16 (0.43 MB)
  config.json  dtype bfloat16
  kept         tensors: 1, computed from config.json: model.layers.0.self_attn.rotary_emb.inv_freq
  head         lm_head.weight, not tied
  LoRA         q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj
note: there is no tokenizer_config.json: set model.tokenizer in a run's config
"""


def test_every_reason_to_refuse_a_model_is_listed(model, capsys):
    change(
        model,
        lm_head__weight=None,
        model__norm__weight=torch.ones(3),
        model__layers__0__mlp__up_proj__weight=torch.ones(2, dtype=torch.int8),
        model__layers__9__mlp__up_proj__weight=torch.ones(2),
    )
    code, found = inspected(capsys, model)
    expected = [
        f"{model} lacks {HEAD}; if the embeddings are tied, set tie_word_embeddings to true",
        f"{model} holds model.layers.9.mlp.up_proj.weight, which this architecture does not use",
        "model.layers.0.mlp.up_proj.weight in",
        "model.layers.0.mlp.up_proj.weight in",
        f"model.norm.weight in {model / 'model.safetensors'} has shape (3,)",
    ]
    assert code == 2 and len(found["problems"]) == len(expected)
    assert all(said.startswith(start) for said, start in zip(found["problems"], expected, strict=True))
    set_keys(model, mlp_bias=True, quantization_config={"quant_method": "hqq"})
    (model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert main(["inspect", str(model)]) == 2
    refused = [line for line in capsys.readouterr().out.splitlines() if line.startswith("refused: ")]
    assert ["git-lfs pointer" in refused[0], "mlp_bias" in refused[1], "quantized" in refused[2]] == [True] * 3
    assert len(refused) == 3


def test_a_tied_model_with_another_head_is_refused_and_with_a_copy_it_is_not(model, capsys):
    set_keys(model, tie_word_embeddings=True, dtype="float32")
    code, found = inspected(capsys, model)
    assert code == 2 and f"differs from {EMBEDDING}, but config.json ties them; set" in found["problems"][0]
    change(model, lm_head__weight=load_file(model / "model.safetensors")[EMBEDDING].clone())
    code, found = inspected(capsys, model)
    assert code == 0 and found["model"]["own_head"]
    assert found["notes"][0] == "config.json says float32, but the weights are bfloat16; an export keeps both"


def test_quantized_weights_are_shown_as_a_run_would_load_them(model, capsys):
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(model / "model.safetensors")[name]
    scales = {f"{name}_scale_inv".replace(".", "__"): torch.ones(1, 1)}
    change(model, **{name.replace(".", "__"): weight.to(torch.float8_e4m3fn)}, **scales)
    set_keys(model, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    code, found = inspected(capsys, model)
    assert code == 0 and found["model"]["dequantized"] == [name]
    assert main(["inspect", str(model)]) == 0
    assert f"  dequantized  tensors: 1: {name}\n" in capsys.readouterr().out


def test_a_model_without_weights_here_is_checked_by_its_config(capsys):
    code, found = inspected(capsys, "deepseek-ai/DeepSeek-V3")
    assert code == 0 and "tensors" not in found and found["model"]["parameters"] == 671_026_404_352
    assert found["notes"] == ["the weights are not on this machine: only config.json is checked"]


def test_the_tensors_of_a_model_are_listed_on_request(model, capsys):
    code, found = inspected(capsys, model)
    assert code == 0 and found["kind"] == "Hugging Face model" and found["facts"]["model_type"] == "llama"
    (row,) = [row for row in found["tensors"] if row["name"] == "model.norm.weight"]
    assert row == dict(
        name="model.norm.weight", shape=[96], dtype="bfloat16", nbytes=192, group="weights", where="model.safetensors"
    )
    assert main(["inspect", str(model), "--tensors"]) == 0
    assert "\nmodel.norm.weight  " in capsys.readouterr().out


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert "refused: " in out and "holds neither model.safetensors nor" in out and "holds no config.json" in out
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert f"refused: {tmp_path / 'nowhere'}" in capsys.readouterr().out
