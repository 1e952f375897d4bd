"""`megagrpo inspect` lists what a Hugging Face folder holds, and says why a run would refuse it. tests/distributed
inspects checkpoints of Megatron."""

import json

import pytest
from safetensors.torch import load_file, save_file

from megagrpo.__main__ import main
from tests.distributed.tiny_families import EVERY, tiny_model

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny_model(*EVERY["llama untied"]).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture
def model(llama, tmp_path):
    """A copy of a Llama with an LM head of its own, in one file."""
    for file in llama.iterdir():
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


def test_the_tensors_of_a_model_are_listed_and_counted(model, capsys):
    code, found = inspected(capsys, model)
    assert code == 0 and found["kind"] == "Hugging Face model" and found["facts"]["model_type"] == "llama"
    (row,) = [row for row in found["tensors"] if row["name"] == "model.norm.weight"]
    assert row == dict(
        name="model.norm.weight", shape=[96], dtype="bfloat16", nbytes=192, group="weights", where="model.safetensors"
    )
    counted = sum(parameter.numel() for parameter in tiny_model(*EVERY["llama untied"]).parameters())
    assert found["totals"]["all"][1] == counted and found["refused"] == ""
    assert main(["inspect", str(model)]) == 0
    assert "\nmodel.norm.weight  " in capsys.readouterr().out


def test_a_model_that_a_run_would_refuse_is_listed_with_the_reason(model, capsys):
    change(model, lm_head__weight=None)
    assert main(["inspect", str(model)]) == 2
    said = f"refused: model: {model} lacks lm_head.weight; if the embeddings are tied, set tie_word_embeddings to true"
    assert capsys.readouterr().out.splitlines()[-1].startswith(said)
    set_keys(model, tie_word_embeddings=True)
    change(model, lm_head__weight=load_file(model / "model.safetensors")[EMBEDDING] + 1)
    code, found = inspected(capsys, model)
    assert code == 2 and f"differs from {EMBEDDING}, but config.json ties them; set" in found["refused"]
    change(model, lm_head__weight=load_file(model / "model.safetensors")[EMBEDDING].clone())
    assert inspected(capsys, model)[0] == 0
    set_keys(model, quantization_config={"quant_method": "hqq"})
    assert "quantized" in inspected(capsys, model)[1]["refused"]


def test_what_cannot_be_read_is_an_error(model, tmp_path, capsys):
    (model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    for path, said in ((model, "git-lfs pointer"), (tmp_path / "nowhere", "nowhere")):
        assert main(["inspect", str(path)]) == 2
        shown = capsys.readouterr()
        assert shown.err.startswith("error: ") and said in shown.err and shown.out == ""
