"""Checkpoints from other users and data from the network are read as data: their code never runs. Our own checkpoints
load unchanged."""

import ast
import json
import os
import pickle
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from megagrpo.engine.servers.serving import adapter_arguments
from megagrpo.families.weight_sources import INDEX
from megagrpo.weights.bridge.adapter_files import read_lora
from megagrpo.weights.bridge.hf_files import HEADERS_FILE, files_of
from megagrpo.weights.bridge.load import Checkpoint
from megagrpo.weights.files.data_only import COMMON_FILE, NotPlainData, data_only, read_metadata, read_object
from megagrpo.weights.files.file_checksums import checksums, verify_others
from megagrpo.weights.files.torch_dist import StoredTensors

ROOT = Path(__file__).parents[4]


class Evil:
    """Code that a pickle can run in the process that loads it."""

    def __init__(self, proof):
        self.proof = str(proof)

    def __reduce__(self):
        return os.mkdir, (self.proof,)


RUNS_WHAT_IT_READS = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "marshal.load",
    "marshal.loads",
    "os.system",
    "os.popen",
    "yaml.unsafe_load",
}
OWN_FILES = {
    ("spawn.py", "pickle.loads"),  # files that the ranks of one command write into a folder that the command has made
    # a call and its result, which the API and its child write into a folder that the API has made
    ("child_process.py", "pickle.loads"),
    ("sandbox_child.py", "marshal.load"),  # a job that the reward worker writes before the program of a response exists
    ("rank_rendezvous.py", "pickle.loads"),  # objects between ranks, after their signature was checked
}


def test_nothing_is_read_in_a_way_that_can_run_it():
    found = set()
    for path in (ROOT / "megagrpo").rglob("*.py"):
        for call in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]:
            name, said = ast.unparse(call.func), {word.arg: ast.unparse(word.value) for word in call.keywords}
            if (
                name in RUNS_WHAT_IT_READS
                or said.get("shell") == "True"
                or (name == "torch.load" and said.get("weights_only") != "True")
            ):
                found.add((path.name, name))
    assert found == OWN_FILES


def test_an_index_that_would_run_something_is_refused_and_runs_nothing(tmp_path):
    proof = tmp_path / "it ran"
    for held in (Evil(proof), Metadata({}, planner_data={"deep": [Evil(proof)]})):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(held))
        with pytest.raises(
            ValueError, match=r"its \.metadata is corrupt: .*the pickle calls posix\.mkdir, which no checkpoint needs"
        ):
            StoredTensors(tmp_path)
        assert not proof.exists()
    pickle.loads((tmp_path / ".metadata").read_bytes())  # the same file in an unsafe loader
    assert proof.exists()
    (tmp_path / ".metadata").write_bytes(pickle.dumps({}))
    with pytest.raises(ValueError, match="it holds a dict"):
        StoredTensors(tmp_path)


OUTSIDE = ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "", "a\0b"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_file_name_that_leaves_its_folder_is_refused_before_the_file_is_opened(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(
        ValueError, match=r"model.safetensors.index.json names the file '.*', which is not inside its folder"
    ):
        Checkpoint(folder)
    (folder / HEADERS_FILE).write_text(json.dumps({name: "{}"}))  # an export writes files with these names
    with pytest.raises(
        ValueError, match=r"safetensors_headers.json names the file '.*', which is not inside its folder"
    ):
        files_of(folder)
    (folder / "checksums.json").write_text(json.dumps({name: "00000000"}))
    with pytest.raises(ValueError, match=r"checksums.json names the file '.*', which is not inside its folder"):
        verify_others(folder)
    pieces = {MetadataIndex("w"): _StorageInfo(relative_path=name, offset=0, length=8)}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=pieces)))
    with pytest.raises(ValueError, match=r"\.metadata names the file '.*', which is not inside its folder"):
        read_metadata(folder)


def test_a_file_that_a_link_leads_to_is_read_as_the_hubs_cache_has_them(tmp_path):
    (tmp_path / "snapshot").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "blob")
    (tmp_path / "snapshot" / "a.safetensors").symlink_to("../blob")
    (tmp_path / "snapshot" / INDEX).write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    assert Checkpoint(tmp_path / "snapshot").tensor("w").tolist() == [0, 0]


def test_an_index_of_torch_is_read_as_torch_reads_it(tmp_path):
    save(
        {"w": torch.arange(6.0).view(2, 3), "n": torch.zeros(2, dtype=torch.bfloat16), "plain": "text"},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    metadata = read_metadata(tmp_path)
    assert (
        tuple(metadata.state_dict_metadata["w"].size) == (2, 3)
        and metadata.state_dict_metadata["n"].properties.dtype == torch.bfloat16
    )


def test_what_else_a_checkpoint_holds_is_read_without_running_it(tmp_path, monkeypatch):
    """Objects, `common.pt` and pieces of tensors, also where torch.load by default reads anything."""
    from megatron.core.dist_checkpointing import serialization

    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    registered = {*torch.serialization.get_safe_globals()}
    evil = {"state": Evil(tmp_path / "it ran")}
    torch.save(evil, tmp_path / COMMON_FILE)
    with data_only(), pytest.raises(NotPlainData, match=r"common\.pt is refused: its pickle names posix\.mkdir"):
        serialization.load_common(str(tmp_path))
    for held in (evil, Evil, numpy.zeros(2), numpy.dtype("O"), torch.nn.Linear(1, 1), os.system):
        torch.save(held, tmp_path / "object")
        with pytest.raises(NotPlainData, match="the object is refused: "):
            read_object(tmp_path / "object", "the object")
    save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "stored", no_dist=True)
    metadata = read_metadata(tmp_path / "stored")
    (chunk,), (info,) = metadata.state_dict_metadata["w"].chunks, metadata.storage_data.values()
    torch.save(evil, tmp_path / "stored" / info.relative_path)
    info.length = (tmp_path / "stored" / info.relative_path).stat().st_size
    (tmp_path / "stored" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(NotPlainData, match=rf"{info.relative_path} \(w\) is refused"):
        StoredTensors(tmp_path / "stored")._piece("w", chunk)
    assert not (tmp_path / "it ran").exists()
    assert {*torch.serialization.get_safe_globals()} >= registered


def test_every_reader_of_an_adapter_in_a_checkpoint_verifies_its_checksum(tmp_path):
    adapter = tmp_path / "step_000001" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(
        json.dumps(dict(peft_type="LORA", r=8, lora_alpha=16, target_modules=["q_proj"]))
    )
    file = adapter / "adapter_model.safetensors"
    save_file({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(8, 4)}, file)
    (adapter.parent / "checksums.json").write_text(json.dumps(checksums(adapter.parent, adapter.iterdir())))
    arguments = adapter_arguments(adapter)
    assert read_lora(adapter).rank == 8 and arguments[-2:] == ["--lora-target-modules", "q_proj"]
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    for read in (read_lora, adapter_arguments):
        with pytest.raises(
            ValueError, match=r"adapter_model.safetensors is corrupt: its CRC-32 is \w{8}; \w{8} was written"
        ):
            read(adapter)
    (adapter.parent / "checksums.json").unlink()  # an adapter from elsewhere has no checksums
    assert read_lora(adapter).rank == 8
