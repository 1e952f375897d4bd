"""A folder in NF4 is the model of its formula: logits, exports and config.json."""

from __future__ import annotations

import json

import torch
from family_proofs import check_model, read_folder
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_families import MODELS, tiny_model

from megagrpo.families.weight_sources import SINGLE
from tests.unit.weights.precision.test_four_bits import four_bits

CONFIG = dict(quant_method="bitsandbytes", load_in_4bit=True)


def test_a_folder_in_nf4_is_the_model_of_its_formula(tmp_path):
    name, extra = MODELS["llama untied"]
    tiny_model(name, extra | dict(intermediate_size=96, head_dim=16)).half().save_pretrained(tmp_path / "plain")
    plain, packed = load_file(tmp_path / "plain" / SINGLE), {}
    for tensor, weight in list(plain.items()):
        if weight.dim() != 2 or "layers" not in tensor:
            packed[tensor] = weight
            continue
        tensors, plain[tensor] = four_bits("nf4", True, tuple(weight.shape), "float16", tensor)
        packed |= tensors
    raw = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "packed").mkdir()
    for folder, tensors in (("plain", plain), ("packed", packed)):
        save_file(tensors, tmp_path / folder / SINGLE, {"format": "pt"})
    config = raw | dict(quantization_config=CONFIG)
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    expected, found = (
        run_ranks(check_model, 1, tmp_path / folder, tmp_path / f"{folder} out", {}, 10**9)
        for folder in ("plain", "packed")
    )
    assert all((ours == theirs).all() for ours, theirs in zip(found[0][0], expected[0][0], strict=True))
    made = read_folder(tmp_path / "packed out")
    assert made.keys() == plain.keys() and all(torch.equal(made[tensor], plain[tensor]) for tensor in plain)
    assert json.loads((tmp_path / "packed out" / "config.json").read_text()) == raw
