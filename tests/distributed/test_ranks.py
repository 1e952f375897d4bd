"""Ranks on this machine: results in rank order, failures with the rank's name, no process left behind."""

import gc
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode


def sum_of_ranks(offset: int) -> float:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return total.item() + dist.get_rank()


def test_every_rank_is_in_the_group_and_results_come_in_rank_order():
    assert run_ranks(sum_of_ranks, 2, 10) == [21.0, 22.0]


def test_what_a_fork_inherits_is_no_garbage_to_be_looked_for():
    assert run_ranks(gc.get_freeze_count, 1)[0] > 10_000


@pytest.mark.full
def test_ranks_can_be_fresh_interpreters():
    assert run_ranks(sum_of_ranks, 1, 10, start="spawn") == [10.0]


def raise_on_the_last(number: int):
    if dist.get_rank() == dist.get_world_size() - 1:
        if number:
            os.kill(os.getpid(), number)
        raise LookupError("no such thing")
    dist.barrier()


def test_the_rank_that_raised_is_named_and_not_those_that_lost_their_peer():
    with pytest.raises(RankFailed, match=r"(?s)rank 2:.*LookupError: no such thing"):
        run_ranks(raise_on_the_last, 3, 0)


def test_a_rank_that_was_killed_is_named_with_the_signal():
    with pytest.raises(RankFailed, match="rank 2: killed by SIGKILL"):
        run_ranks(raise_on_the_last, 3, signal.SIGKILL)


def test_ranks_that_do_not_finish_are_named_and_ended():
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"ranks \[1\] did not finish within 4 s"):
        run_ranks(lambda: time.sleep(60 * dist.get_rank()), 2, timeout=4)
    assert time.monotonic() - started < 20


def start_sleepers(folder: Path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process of a script ignores SIGINT
    run_ranks(lambda: (folder / str(os.getpid())).touch() or time.sleep(120), 2)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_ranks_end_when_their_caller_ends(number, tmp_path):
    caller = multiprocessing.get_context("fork").Process(target=start_sleepers, args=(tmp_path,))
    caller.start()
    pids = wait_for(lambda: [int(file.name) for file in tmp_path.iterdir()], lambda pids: len(pids) == 2)
    os.kill(caller.pid, number)
    caller.join(60)
    assert not any(wait_for(lambda: [is_alive(pid) for pid in pids], lambda alive: not any(alive)))


def wait_for(look, enough, seconds: float = 60):
    """Return `look()` once it is `enough`, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while not enough(found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def groups_after_a_layout() -> list[str]:
    """Names in Megatron's module that still hold a process group when a layout has ended."""
    from megatron.core import parallel_state

    from megagrpo.config import ParallelSection
    from megagrpo.platform.parallel.layout import init_layout

    init_layout(ParallelSection()).close()
    return [name for name, value in vars(parallel_state).items() if isinstance(value, dist.ProcessGroup)]


def test_a_layout_that_ends_leaves_no_process_group_to_forks():
    assert run_ranks(groups_after_a_layout, 1) == [[]]


def backward() -> float:
    weight = torch.ones(1, requires_grad=True)
    (2 * weight).sum().backward()
    return weight.grad.item()


def test_ranks_run_backward_passes_after_this_process_has_run_one_beside_fake_tensors():
    """Fake tensors register a device, for which autograd would start a thread that no fork has."""
    with FakeTensorMode():
        torch.empty(2)
    assert backward() == 2.0 and run_ranks(backward, 2) == [2.0, 2.0]
