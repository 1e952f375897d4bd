"""Weight syncs by CUDA IPC between two processes with a fake GPU each (ipc.py): a worker dies in the first update, the
second one arrives, and no memory stays. Planted bugs are seen."""

import gc

import pytest
import torch
import torch.distributed as dist
from test_cuda_sync import push

from megagrpo.sync.wire import copy_checksums
from megagrpo.sync.wire.cuda_handles import mappable_bytes
from megagrpo.types import WeightSyncError
from tests.fake_gpu import planted_bugs as bugs
from tests.fake_gpu.runtime import needs_fake_gpu, on_gpus

pytestmark = [pytest.mark.fake_gpu, needs_fake_gpu, pytest.mark.timeout(600)]
BUGS = {bugs.an_unreleased_handle: "left ", bugs.a_block_announced_early: "raised "}


def problems_of_a_sync(bug, folder) -> list[str] | None:
    """What the trainer shows: an exception, or memory that is left on its GPU. The worker's rank returns None."""
    with pytest.MonkeyPatch.context() as patch:
        if bug is not None:
            bug(patch)
        before = torch.cuda.memory_allocated()
        try:
            push(folder)
        except KeyError:
            return None  # the worker's request is empty: the trainer has failed
        except WeightSyncError as error:
            (folder / "request").write_text("{}")
            return [f"raised {error}"]
        copy_checksums.position_table.cache_clear()  # the weights of positions stay for the next sync
        gc.collect()
        left = torch.cuda.memory_allocated() - before
        return [f"left {left} bytes"] if left and dist.get_rank() == 0 else []


def test_a_sync_leaves_no_memory_behind(tmp_path):
    assert on_gpus(problems_of_a_sync, 2, None, tmp_path)[0] == []


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path):
    problems = on_gpus(problems_of_a_sync, 2, bug, tmp_path)[0]
    assert [problem for problem in problems if problem.startswith(BUGS[bug])], problems


def allocated_with_expandable_segments() -> tuple[list[bool], str]:
    """Whether each segment is expandable, and the error of an ordinary allocation: the runtime has no virtual memory."""
    buffer = mappable_bytes(32 << 20, torch.device("cuda"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty_like(buffer)
    return [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()], str(caught.value)


def test_the_buffer_that_workers_map_is_not_in_an_expandable_segment():
    (segments, error), *_ = on_gpus(
        allocated_with_expandable_segments, 1, PYTORCH_ALLOC_CONF="max_split_size_mb:64,expandable_segments:True"
    )
    assert segments == [False]
    assert "cuDeviceGet" in error  # torch looks for CUDA's virtual memory, so its settings are back
