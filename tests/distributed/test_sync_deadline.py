"""A trainer rank that hangs while it writes its weights is named with its current parameter. The other ranks stop after
the timeout."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from ranks import RankFailed, run_ranks

from megagrpo.config import ParallelSection
from megagrpo.families.shared.blocks import Block
from megagrpo.families.shared.boxes import whole
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.sync.trainer_side.shared_memory import SharedMemory
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.sync.trainer_side.transport import TransportSettings
from megagrpo.types import WeightSyncError


class Hangs:
    """A parameter that stops the process that reads it, after `reads` reads."""

    def __init__(self, param: torch.Tensor, reads: int):
        self.param, self.reads = param, reads

    def detach(self) -> torch.Tensor:
        if self.reads == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.reads -= 1
        return self.param


def push(shared: Path, hanging: int, reads: int) -> None:
    layout = init_layout(ParallelSection())
    rank, values = layout.world_rank, torch.zeros(64, 4)
    found = [
        (f"decoder.{name}", values, [Block(f"{name}{rank}", (64, 4), whole((64, 4)), (64, 4), axis=0, at=0, count=64)])
        for name in "abc"
    ]
    if rank == hanging:
        found[1] = (found[1][0], Hangs(values, reads), found[1][2])
    with WeightSync(
        object() if rank == 0 else None,
        layout,
        "float32",
        SharedMemory(layout, "float32", TransportSettings(seconds=1.0), folder=shared),
    ) as sync:
        try:
            sync.push(found, 1)
        except WeightSyncError:
            if rank > 0:
                time.sleep(10)  # only rank 0 knows which rank is late, so its error must be the first one
            raise


@pytest.mark.parametrize(("hanging", "reads"), [(1, 0), (2, 1)], ids=["checking", "writing"])
def test_a_rank_that_hangs_while_it_publishes_is_named_with_its_parameter(hanging, reads, tmp_path):
    started = time.monotonic()
    with pytest.raises(
        RankFailed,
        match=rf"phase publish: rank {hanging} did not join within 1 s .*; rank {hanging} is stuck in: parameter "
        rf"decoder\.b",
    ):
        run_ranks(push, 3, tmp_path, hanging, reads)
    assert time.monotonic() - started < 20
