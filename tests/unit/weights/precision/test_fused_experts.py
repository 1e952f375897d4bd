"""Experts that transformers 5 saves fused are read as the tensors of the family's own files."""

from __future__ import annotations

import pytest
import torch
from tiny_families import EVERY, has_experts, tiny_model

from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.weight_sources import SINGLE
from megagrpo.weights.bridge.load import Checkpoint
from tests.unit.for_each import for_each

ONE_OF_EACH = {kind: name for name, (kind, _) in EVERY.items() if has_experts(name)}
for kind in ("KimiK25ForConditionalGeneration", "NemotronH"):
    del ONE_OF_EACH[kind]  # transformers then saves other tensors under other names too, and loading refuses them


@pytest.mark.full
@for_each("name", ONE_OF_EACH.values())
def test_every_family_reads_them_as_its_own(name, tmp_path):
    from megagrpo.sync.vllm_side.unpacking import unpacked

    model = tiny_model(*EVERY[name]).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "own")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    own, fused = Checkpoint(tmp_path / "own"), Checkpoint(tmp_path / "fused")
    published_fused = any(tensor.endswith("experts.gate_up_proj") for tensor in own.where)
    assert set(fused.files[SINGLE].entries) != set(own.where) or published_fused
    fused.check_all(load_hf_config(tmp_path / "fused"))
    of_speech = "talker."  # of Qwen-Omni: stays as loaded
    names = {tensor for tensor in own.where if not tensor.startswith(of_speech)}
    assert {tensor for tensor in fused.where if not tensor.startswith(of_speech)} == names
    read = dict(unpacked(tmp_path / "fused"))
    assert read.keys() == fused.where.keys()
    for tensor in names:
        assert (
            own.entry(tensor).dtype == fused.entry(tensor).dtype
            and own.entry(tensor).shape == fused.entry(tensor).shape
        )
        assert torch.equal(own.tensor(tensor), fused.tensor(tensor)), tensor
        assert torch.equal(own.tensor(tensor), read[tensor]), tensor
