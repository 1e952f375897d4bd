"""The benchmark of control messages: ranks as threads agree with the computed times, and reduce correctly."""

import pytest
import torch

from benchmarks.control_messages import STEP, VirtualRanks, reduced_seconds, table


@pytest.mark.full
@pytest.mark.parametrize("ranks", [8, 64, 128])
def test_threads_take_the_computed_time(ranks):
    for num_bytes in {control.bytes(ranks) for control in STEP} | {2**17}:
        _, seconds = VirtualRanks(ranks).all_reduce(lambda rank, n=num_bytes: torch.zeros(n // 8, dtype=torch.int64))
        assert seconds == pytest.approx(reduced_seconds(ranks, num_bytes), rel=1e-6)


def test_threads_reduce_as_ranks_do():
    results, _ = VirtualRanks(100).all_reduce(lambda rank: torch.tensor([rank, 1]))
    assert all(result.tolist() == [4950, 100] for result in results)


def test_the_control_messages_of_a_step_take_less_than_50_ms_at_1024_ranks_and_at_16384():
    small, large, largest = table((64, 1024, 16384), largest_run=64)
    assert small.runs and not large.runs
    assert small.reduced < large.reduced < largest.reduced < 0.05
    assert large.gathered > 0.05
