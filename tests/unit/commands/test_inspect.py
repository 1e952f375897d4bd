"""`megagrpo inspect` lists what a folder holds. tests/distributed inspects checkpoints of Megatron."""

import json

import torch
from safetensors.torch import save_file

from megagrpo.__main__ import main


def test_the_tensors_of_a_folder_are_listed(tmp_path, capsys):
    save_file({"a.weight": torch.ones(3, 2, dtype=torch.bfloat16), "b": torch.ones(5)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="llama", num_hidden_layers=7)))
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "Hugging Face model" and found["facts"] == dict(model_type="llama", num_hidden_layers="7")
    row = dict(group="weights", where="model.safetensors")
    assert sorted(found["tensors"], key=lambda tensor: tensor["name"]) == [
        dict(name="a.weight", shape=[3, 2], dtype="bfloat16", nbytes=12) | row,
        dict(name="b", shape=[5], dtype="float32", nbytes=20) | row,
    ]
    assert found["totals"] == {"weights, float32": [1, 5, 20], "weights, bfloat16": [1, 6, 12], "all": [2, 11, 32]}
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}: Hugging Face model" and lines[-1] == "all: 2 tensors, 11 numbers, 32 bytes"


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
