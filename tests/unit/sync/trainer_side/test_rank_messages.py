"""What the ranks of a sync tell each other: numbers as tensors, objects only when something changed or failed."""

import pytest
import torch.distributed as dist
from ranks import run_ranks

from megagrpo.config import ParallelSection
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.sync.trainer_side.transport import (
    SendReport,
    of_first_rank,
    outcome_of_first_rank,
    own_or_raise,
    reports_of_ranks,
)
from megagrpo.types import WeightSyncError
from megagrpo.weights.bridge.megatron_io import sums_of_ranks
from tests.message_log import objects, record
from tests.rank_fakes import GroupRanks

REPORTS = [SendReport(2**40 + 1, 0.1, (2**64 - 1, 0, 7), 1 / 3), SendReport(0), SendReport(5, 1e-9, (2**63,), 2.5)]


def exchange() -> dict[str, object]:
    layout, rank = init_layout(ParallelSection()), dist.get_rank()
    ranks = GroupRanks(rank)
    with record(layout) as messages:
        results: dict[str, object] = {
            "reports": reports_of_ranks(ranks, REPORTS[rank]),
            "own": own_or_raise(ranks, lambda: rank),
            "outcome": outcome_of_first_rank(ranks, (0.5, 2**50 + 1) if rank == 0 else (), 2),
            "nothing": outcome_of_first_rank(ranks, (), 0),
            "same": of_first_rank(ranks, {"a": 1} if rank == 0 else {}, {"a": 1}),
        }
    results["objects"] = objects(messages)
    results["changed"] = of_first_rank(ranks, {"a": 2} if rank == 0 else {}, {"a": 1})
    failed = SendReport(0, problem="rank 1: no disk")
    results["problems"] = [report.problem for report in reports_of_ranks(ranks, failed if rank == 1 else REPORTS[0])]
    results["error"] = str(outcome_of_first_rank(ranks, WeightSyncError("no server") if rank == 0 else (), 2))
    with pytest.raises(WeightSyncError, match=r"^rank 1: no 1; rank 2: no 2$"):
        own_or_raise(ranks, lambda: 1 / 0 if rank > 5 else None if rank == 0 else no(rank))
    return results


def no(rank: int) -> None:
    raise ValueError(f"no {rank}")


def test_numbers_travel_as_tensors_and_keep_their_bits():
    for rank, found in enumerate(run_ranks(exchange, 3)):
        assert found["reports"] == REPORTS and found["own"] == rank and found["outcome"] == [0.5, 2**50 + 1]
        assert found["nothing"] == [] and found["same"] == {"a": 1} and found["objects"] == []
        assert found["changed"] == {"a": 2} and found["problems"] == ["", "rank 1: no disk", ""]
        assert found["error"] == "no server"


def sums() -> dict[str, str]:
    files = {0: {"__0_0.distcp": "00000000", "__0_1.distcp": "ffffffff"}, 2: {"__2_3.distcp": "0a0b0c0d"}}
    return sums_of_ranks(files.get(dist.get_rank(), {}), init_layout(ParallelSection()))


def test_every_rank_knows_the_checksums_of_all_files():
    for found in run_ranks(sums, 3):
        assert found == {"__0_0.distcp": "00000000", "__0_1.distcp": "ffffffff", "__2_3.distcp": "0a0b0c0d"}
