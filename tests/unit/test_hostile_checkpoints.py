"""A checkpoint of somebody else is data: nothing in it runs."""

import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from megagrpo.bridge.stored_metadata import read_metadata
from megagrpo.bridge.torch_dist import StoredTensors


class Evil:
    """What a pickle can do to whoever reads it."""

    def __init__(self, proof):
        self.proof = str(proof)

    def __reduce__(self):
        return os.mkdir, (self.proof,)


def test_an_index_that_would_run_something_is_refused_and_runs_nothing(tmp_path):
    proof = tmp_path / "it ran"
    for held in (Evil(proof), Metadata({}, planner_data={"deep": [Evil(proof)]})):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(held))
        with pytest.raises(ValueError, match=r"its \.metadata is corrupt: .*it asks to run posix\.mkdir, which no checkpoint needs"):
            StoredTensors(tmp_path)
        assert not proof.exists()
    pickle.loads((tmp_path / ".metadata").read_bytes())  # the same file to a reader that trusts it
    assert proof.exists()
    (tmp_path / ".metadata").write_bytes(pickle.dumps({}))
    with pytest.raises(ValueError, match="it holds a dict"):
        StoredTensors(tmp_path)


def test_an_index_of_torch_is_read_as_torch_reads_it(tmp_path):
    save(
        {"w": torch.arange(6.0).view(2, 3), "n": torch.zeros(2, dtype=torch.bfloat16), "plain": "text"},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    metadata = read_metadata(tmp_path)
    assert tuple(metadata.state_dict_metadata["w"].size) == (2, 3) and metadata.state_dict_metadata["n"].properties.dtype == torch.bfloat16


def test_what_else_a_checkpoint_holds_is_read_without_running_it(tmp_path):
    """Megatron reads `common.pt` and objects by torch.load, whose default, tensors and plain values alone, is what this rests on."""
    torch.save({"state": Evil(tmp_path / "it ran")}, tmp_path / "common.pt")
    from megatron.core.dist_checkpointing.strategies.common import load_common

    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        load_common(str(tmp_path))
    assert not (tmp_path / "it ran").exists()
