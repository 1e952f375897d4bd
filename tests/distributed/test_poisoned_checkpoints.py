"""A run resumes from a checkpoint of somebody else: whichever of its files holds a pickle, no code in it runs, and the
error names the file."""

import dataclasses
import io
import json
import os
import pickle
import shutil

import pytest
import torch
from ranks import run_ranks
from test_checkpoint import believe, checkpointer, model  # noqa: F401 (a fixture)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megagrpo.engine.servers.serving import adapter_arguments
from megagrpo.records.checkpoints.ahead_files import read_ahead
from megagrpo.records.checkpoints.checkpoint import CheckpointError
from megagrpo.train_types import TrainState
from megagrpo.weights.bridge.adapter_files import read_lora
from megagrpo.weights.bridge.load import Checkpoint
from megagrpo.weights.files.data_only import COMMON_FILE, METADATA_FILE, read_metadata

PROOF = "proof"  # the folder that the code in a pickle creates, in the working directory


class Evil:
    def __reduce__(self):
        return os.mkdir, (PROOF,)


def archive(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def legacy(value):
    """The format of torch.save before its zip archives."""
    return archive(value, _use_new_zipfile_serialization=False)


FORMATS = {"archive": archive, "legacy": legacy, "plain": pickle.dumps}


def poison(path, index, content):
    """Make the index name `content`, after the file's own bytes, as the stored item `index`."""
    metadata = read_metadata(path)
    info = metadata.storage_data[index]
    with open(path / info.relative_path, "ab") as file:
        offset = file.tell()
        file.write(content)
    metadata.storage_data[index] = dataclasses.replace(info, offset=offset, length=len(content))
    (path / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    return info.relative_path


def refused(load, path):
    """The error of a load that must fail, after which no code has run."""
    with pytest.raises((CheckpointError, ValueError)) as caught:
        load(path)
    assert not os.path.exists(PROOF), f"{path}: the code in a pickle ran"
    assert "weights_only" not in str(caught.value), "the advice of torch to read the file without protection"
    return str(caught.value)


def _resume(model, folder, distributed):  # noqa: F811
    os.chdir(folder)
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # as some users need for other programs
    _, saver = checkpointer(model, folder, parallel=dict(tp=1), distributed_optimizer=distributed)
    ahead = [{"place": 0, "rollouts": []}]
    saver.start(TrainState(step=1), background=False, ahead=ahead)
    good, bad = saver.finish(wait=True), folder / "step_000002"
    stored = read_metadata(good)
    objects = [key for key, value in stored.state_dict_metadata.items() if isinstance(value, BytesStorageMetadata)]
    assert {"rng/shard_0_1", "common_state/shard_0_1"} <= {*objects}
    firsts = [index for index in stored.storage_data if index.fqn.startswith(("decoder.layers", "optimizer.state"))]
    tensors = [firsts[0], firsts[-1]]
    told = {}
    for index in [*(index for index in stored.storage_data if index.fqn in objects), *tensors]:
        for name, write in FORMATS.items():
            shutil.copytree(good, bad)
            file = poison(bad, index, write([Evil()] if index.fqn in objects else Evil()))
            believe(bad)
            told[index.fqn, name] = file, refused(saver.load, bad)
            shutil.rmtree(bad)
    whole = sorted(str(path.relative_to(good)) for path in good.rglob("*") if path.is_file())
    for name in [*whole, COMMON_FILE]:
        for kind, write in FORMATS.items():
            shutil.copytree(good, bad)
            (bad / name).write_bytes(write({"state": Evil()}))
            if name != "checksums.json":
                believe(bad)
            if name.startswith(("hf/", "ahead_")):
                saver.load(bad)  # these have other readers
                assert not os.path.exists(PROOF)
            else:
                told[name, kind] = name, refused(saver.load, bad)
            if name.startswith("ahead_"):
                told[name, kind] = name, refused(lambda path: list(read_ahead(path, 0, 1)), bad)
            shutil.rmtree(bad)
    for name, pickled in INDEXES.items():
        shutil.copytree(good, bad)
        (bad / METADATA_FILE).write_bytes(pickled())
        believe(bad)
        told[name, ""] = METADATA_FILE, refused(saver.load, bad)
        shutil.rmtree(bad)
    assert not hasattr(Metadata, "planted")
    return told, saver.load(good).step


def on_class():
    """Opcodes that set Metadata.planted = 1, and then make a Metadata."""
    cls = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    return b"\x80\x02" + cls + b"N}X\x07\x00\x00\x00plantedK\x01s\x86b0" + cls + b")\x81}b."


INDEXES = {
    "in a field": lambda: pickle.dumps(Metadata({}, planner_data={"deep": [Evil()]})),
    "on a class": on_class,
    "of builtins": lambda: b"cbuiltins\nexec\n(X\x13\x00\x00\x00import os;os.mkdir\x28tR.",
    "a dotted name": lambda: b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x02id\x85R.",
}


@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.full)])
def test_no_file_of_a_checkpoint_runs_code(distributed, model, tmp_path):  # noqa: F811
    told, step = run_ranks(_resume, 1, model, tmp_path, distributed)[0]
    assert step == 1 and len(told) > 30
    for (item, kind), (file, message) in told.items():
        assert file in message and len(message.splitlines()) == 1, (item, kind, file, message)
    assert any("names posix.mkdir" in message for _, message in told.values())


def test_no_file_of_a_model_or_an_adapter_runs_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        for kind, write in FORMATS.items():
            folder = tmp_path / f"{file} {kind}"
            folder.mkdir()
            saved = dict(peft_type="LORA", r=8, lora_alpha=16, target_modules=["q_proj"])
            (folder / "adapter_config.json").write_text(json.dumps(saved))
            (folder / file).write_bytes(write(Evil()))
            assert "adapter_" in refused(adapter_arguments, folder)
            if file != "adapter_model.safetensors":  # read by `load_adapter`
                assert "adapter_" in refused(read_lora, folder)
    for file in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        for kind, write in FORMATS.items():
            folder = tmp_path / f"{file} {kind}"
            folder.mkdir()
            (folder / file).write_bytes(write({"w": Evil()}))
            refused(Checkpoint, folder)
