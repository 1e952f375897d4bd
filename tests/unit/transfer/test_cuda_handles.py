"""Handles of GPU memory as plain JSON, and the worker of each handle. Mapping the memory needs a GPU."""

import inspect
import json

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megagrpo.transfer.cuda_handles import FIELDS, DeviceMaps, pack, unpack
from megagrpo.transfer.ledger import Ledgers
from megagrpo.transfer.manifest import Manifest, SharedBlock, SharedTensor, WeightSyncError
from megagrpo.vllm_plugin.reader import MappedBlocks
from megagrpo.weight_sync.cuda_ipc import HandleUpdate

VALUES = (bytes(range(64)), 4096, 512, False, b"/torch_7_1", 3, bytes(64), True)
MANIFEST = Manifest(4, "float32", {"w": SharedTensor((4,), (SharedBlock(0, "gpu of rank 0", 0, ((0,), (4,)), 0),))})


def test_a_handle_comes_back_from_json_as_it_was():
    assert unpack(json.loads(json.dumps(pack(1000, VALUES)))) == (1000, VALUES)


def test_the_fields_are_those_that_torch_rebuilds_a_tensor_from():
    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[7:] == list(FIELDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"storage_handle": "not base64!"}, "'not base64!' for storage_handle"),
        ({"storage_size_bytes": "4096"}, "'4096' for storage_size_bytes"),
        ({"event_handle": None}, "None for event_handle"),
        ({"requires_grad": 0}, "0 for requires_grad"),
        ({"more": 1}, "has the fields .*more"),
    ],
)
def test_an_invalid_handle_is_refused_before_it_is_opened(change, message):
    with pytest.raises(WeightSyncError, match=message):
        DeviceMaps({"m": pack(1000, VALUES) | change}, torch.device("cuda", 0)).bytes_of("m")


def test_memory_without_a_handle_is_named(tmp_path):
    with pytest.raises(WeightSyncError, match="no CUDA IPC handle received for the GPU memory gpu of rank 0"):
        MappedBlocks(MANIFEST, 0, DeviceMaps({}, torch.device("cuda", 0)), Ledgers(tmp_path, 4))


def test_every_worker_of_every_server_gets_a_handle_of_its_own(tmp_path):
    handles = {f"gpu of rank {rank}": [{"count": 10 * rank + worker} for worker in range(3)] for rank in range(2)}
    update = HandleUpdate(MANIFEST, tmp_path, None, None, [], servers={"http://a": 1, "http://b": 2}, handles=handles)
    assert update.request("http://a")["handles"] == {"gpu of rank 0": [{"count": 0}], "gpu of rank 1": [{"count": 10}]}
    told = update.request("http://b")
    assert told["handles"]["gpu of rank 1"] == [{"count": 11}, {"count": 12}] and told["version"] == 4
    assert Manifest.load(told["manifest"], told["version"]) == MANIFEST
