"""Handles of GPU memory as plain JSON, and the worker of each handle. Mapping the memory needs a GPU."""

import inspect
import json
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megagrpo.sync.trainer_side.cuda_ipc import HandleUpdate
from megagrpo.sync.trainer_side.shared_memory import replies_of
from megagrpo.sync.vllm_side.memory_receiver import MappedBlocks
from megagrpo.sync.wire import cuda_handles
from megagrpo.sync.wire.cuda_handles import FIELDS, DeviceMaps, mappable_bytes, pack, unpack
from megagrpo.sync.wire.progress_file import ProgressReader
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.tensor_index import SharedBlock, SharedTensor, TensorIndex

VALUES = (bytes(range(64)), 4096, 512, False, b"/torch_7_1", 3, bytes(64), True)
INDEX = TensorIndex(4, "float32", {"w": SharedTensor((4,), (SharedBlock(0, "gpu of rank 0", 0, ((0,), (4,)), 0),))})


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
        MappedBlocks(INDEX, 0, DeviceMaps({}, torch.device("cuda", 0)), ProgressReader(tmp_path, 4))


def of_servers(handle) -> dict:
    """Handles of the buffers of two ranks for a server of one worker and a server of two."""
    workers = {"http://a": [0], "http://b": [1, 2]}
    return {
        url: {f"gpu of rank {rank}": [handle(10 * rank + i) for i in numbers] for rank in range(2)}
        for url, numbers in workers.items()
    }


def update_of(folder, **memory) -> HandleUpdate:
    """An update to a server of one worker and a server of two."""
    files = dict(folder=folder, seconds=None, slots=None, servers={"http://a": 1, "http://b": 2})
    return HandleUpdate(index=INDEX, receiver="", **files, **memory)


def test_every_worker_of_every_server_gets_a_handle_of_its_own(tmp_path):
    handles = of_servers(lambda number: {"count": number})
    update = update_of(tmp_path, handles=handles, buffers={})
    assert update.request("http://a")["handles"] == {"gpu of rank 0": [{"count": 0}], "gpu of rank 1": [{"count": 10}]}
    told = update.request("http://b")
    assert told["handles"]["gpu of rank 1"] == [{"count": 11}, {"count": 12}]
    assert TensorIndex.load(told["index"], 4) == INDEX


def test_handles_of_workers_without_a_report_are_counted_down_so_that_torch_frees_the_memory(tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr(
        torch.UntypedStorage, "_release_ipc_counter_cuda", lambda handle, offset: counted.append((handle, offset))
    )
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: counted.append("collected"))
    handles = of_servers(lambda number: pack(8, (*VALUES[:5], number, *VALUES[6:])))
    update = update_of(tmp_path, handles=handles, buffers={"gpu of rank 1": torch.zeros(8)})
    for server in handles:
        update.request(server)
    (replies_of(tmp_path, "http://b") / "worker0.json").write_text('{"worker": 0}')
    update.release()
    # this rank's buffer, for the two workers that did not report
    assert counted == [(VALUES[4], 10), (VALUES[4], 12), "collected"]
    assert not update.buffers


def test_a_reader_waits_for_no_event_of_the_exporting_gpu(monkeypatch):
    monkeypatch.setattr(cuda_handles, "reduce_tensor", lambda buffer: (None, (*range(7), *VALUES)))
    exported = cuda_handles.export(
        SimpleNamespace(is_cuda=True, dtype=torch.uint8, dim=lambda: 1, storage_offset=lambda: 0, numel=lambda: 9)
    )
    assert unpack(exported) == (9, (*VALUES[:-1], False))


@pytest.mark.parametrize(
    ("settings", "meanwhile"),
    [
        (
            "max_split_size_mb:64, expandable_segments: True,roundup_power2_divisions:4",
            "max_split_size_mb:64, expandable_segments: False,roundup_power2_divisions:4",
        ),
        ("expandable_segments:False", "expandable_segments:False"),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
        ("", ""),
    ],
)
def test_a_buffer_for_other_processes_is_allocated_outside_of_expandable_segments(settings, meanwhile, monkeypatch):
    """torch's settings are real; the allocation is a GPU's. tests/fake_gpu/test_sync.py makes it."""
    read, write = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings
    before, seen = read(), []
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: seen.append(read()))
    try:
        write(settings)
        mappable_bytes(8, torch.device("cpu"))
        assert (seen, read()) == ([meanwhile], settings)
        monkeypatch.setattr(torch, "empty", lambda *shape, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mappable_bytes(8, torch.device("cpu"))
        assert read() == settings  # also after running out of memory
    finally:
        write(before)
