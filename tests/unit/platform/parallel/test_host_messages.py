"""Small messages between ranks: reductions with the same bits on every rank, groups of leaders and of a replica."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.distributed_c10d import _get_default_store

from megagrpo.config import ParallelSection
from megagrpo.platform.parallel.agree import RankError, on_first_rank, run_and_agree, run_own_and_agree
from megagrpo.platform.parallel.host_messages import LONG_BYTES
from megagrpo.platform.parallel.layout import LateRanks, init_layout
from tests.distributed.suites import usual
from tests.message_log import record


def first_and_last(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    assert lower[1] < upper[0], "ranks are not merged in their order"
    return torch.stack([lower[0], upper[1]])


def reduced_values() -> dict[str, torch.Tensor]:
    layout = init_layout(ParallelSection())
    mine = torch.tensor([0.1, 1e16, -0.0, float(layout.world_rank)], dtype=torch.float64) * (layout.world_rank + 1)
    mine[2] = 0.0 if layout.world_rank % 2 else -0.0
    everyone = [torch.empty_like(mine) for _ in range(layout.world_size)]
    dist.all_gather(everyone, mine)
    assert torch.allclose(layout.all_reduce(mine), torch.stack(everyone).sum(0), rtol=1e-15), "the sum is wrong"
    results = {name: layout.all_reduce(mine, name) for name in ("sum", "max", "min")}
    assert results["max"][3] == torch.stack(everyone).amax(0)[3], "the maximum is wrong"
    assert results["min"][1] == 1e16, "the minimum is wrong"
    assert mine[3] == layout.world_rank * (layout.world_rank + 1), "the reduction changed its input"
    long = torch.arange(LONG_BYTES, dtype=torch.float64) / (layout.world_rank + 3)  # exchanged in halves
    results["long"] = layout.all_reduce(long)
    halves = [layout.all_reduce(part.clone()) for part in long.split(LONG_BYTES // 16)]
    assert torch.equal(torch.cat(halves), results["long"]), "the two ways to reduce give different bits"
    ranks = layout.all_reduce(torch.tensor([layout.world_rank, layout.world_rank]), first_and_last)
    assert ranks.tolist() == [0, layout.world_size - 1], "a merge does not get its tensors in rank order"
    results["counts"] = layout.all_reduce(torch.tensor([1, layout.world_rank]))
    return results


@pytest.mark.parametrize("world", usual(range(1, 8), 2, 6))
def test_every_rank_gets_the_same_bits_whatever_the_number_of_ranks(world):
    first, *others = run_ranks(reduced_values, world)
    assert first["counts"].tolist() == [world, world * (world - 1) // 2]
    for other in others:
        for name, values in first.items():
            assert values.numpy().tobytes() == other[name].numpy().tobytes(), f"{name} differs between ranks"


def two_contribute() -> bool:
    layout = init_layout(ParallelSection())
    torch.manual_seed(7)
    parts = torch.randn(2, 1000, dtype=torch.float64)
    mine = parts[layout.world_rank // 2] if layout.world_rank in (1, 3) else torch.zeros(1000, dtype=torch.float64)
    return torch.equal(layout.all_reduce(mine), parts[0] + parts[1])


def test_with_two_contributing_ranks_a_sum_has_the_bits_of_one_addition():
    assert all(run_ranks(two_contribute, 4))


def groups() -> dict[str, object]:
    layout = init_layout(ParallelSection(tp=2, pp=2))
    members = [dist.get_process_group_ranks(g) for g in (layout.replica, layout.leaders) if g is not None]
    seen = torch.tensor([layout.world_rank])
    dist.all_reduce(seen, group=layout.replica)
    result = {
        "members": members,
        "sum": seen.item(),
        "leader": layout.is_dp_leader,
        "leaders": [layout.leader_of(dp_rank) for dp_rank in range(layout.dp_size)],
    }
    layout.release()
    layout = init_layout(ParallelSection(tp=2, pp=2))
    on_leaders = torch.tensor([layout.dp_rank])
    if layout.leaders is not None:
        dist.all_reduce(on_leaders, group=layout.leaders)
        assert on_leaders.item() == 1, "the leaders do not reach each other after a second initialization"
    layout.release()
    other = init_layout(ParallelSection(tp=4))
    dist.barrier(group=other.replica)
    dist.barrier()
    return result


def test_leaders_and_replicas_are_groups_of_their_own_also_after_the_layout_is_made_again():
    ranks = run_ranks(groups, 8)
    for rank, result in enumerate(ranks):
        replica = [0, 1, 4, 5] if rank % 4 < 2 else [2, 3, 6, 7]
        assert result["members"] == [replica, [0, 2]] if rank in (0, 2) else [replica]
        assert (result["sum"], result["leader"], result["leaders"]) == (sum(replica), rank in (0, 2), [0, 2])


def agreements() -> list[object]:
    layout = init_layout(ParallelSection())

    def fails_on(*ranks: int) -> object:
        if layout.world_rank in ranks:
            raise LookupError(f"no {layout.world_rank}")
        return layout.world_rank

    results: list[object] = [run_own_and_agree(layout, fails_on), run_and_agree(layout, fails_on)]
    results.append(on_first_rank(layout, lambda: f"from {layout.world_rank}"))
    for action in (run_own_and_agree, run_and_agree):
        try:
            action(layout, lambda: fails_on(1, 2))
        except Exception as error:
            results.append((type(error), str(error)))
    try:
        on_first_rank(layout, lambda: fails_on(0))
    except Exception as error:
        results.append((type(error), str(error)))
    results.append(on_first_rank(layout, lambda: None))
    return results


def test_a_failed_rank_raises_its_own_error_and_the_others_name_the_first_failed_rank():
    for rank, results in enumerate(run_ranks(agreements, 3)):
        mine = (LookupError, f"no {rank}") if rank in (1, 2) else (RankError, "rank 1: LookupError: no 1")
        first = (LookupError, "no 0") if rank == 0 else (RankError, "rank 0: LookupError: no 0")
        assert results == [rank, [0, 1, 2], "from 0", mine, mine, first, None]


def timed_and_untimed() -> list[list[str]]:
    layout = init_layout(ParallelSection())
    kinds = []
    for within in (30.0, None):
        with record(layout) as messages:
            assert layout.all_reduce(torch.tensor(1), within=within) == layout.world_size
        kinds.append([message.kind for message in messages])
    with record(layout) as messages:
        layout.all_gather_objects("x", within=30.0)
    kinds.append([message.kind for message in messages])
    return kinds


def test_a_timed_message_costs_as_many_rounds_as_an_untimed_one_and_no_barrier():
    for timed, untimed, objects in run_ranks(timed_and_untimed, 4):
        assert timed == untimed == ["isend", "irecv"] * 2, "a timeout adds messages"
        assert objects == [*timed, "all_gather_object"]


def late(hanging: int) -> list[int]:
    layout = init_layout(ParallelSection())
    layout.all_reduce(torch.tensor(0))
    if layout.world_rank == hanging:  # it joins after the others have given up
        _get_default_store().wait([f"joined/{rank}" for rank in range(layout.world_size) if rank != hanging])
    with pytest.raises(LateRanks) as raised:
        layout.all_reduce(torch.tensor(0), within=1.0)
    if layout.world_rank == 0:
        _get_default_store().wait([f"joined/{hanging}"])
    return raised.value.ranks


@pytest.mark.parametrize("hanging", usual([1, 2, 4], 2))
def test_rank_0_names_the_rank_that_joins_after_the_timeout(hanging):
    assert run_ranks(late, 5, hanging) == [[hanging], [], [], [], []]


def logged() -> list[list[tuple]]:
    layout = init_layout(ParallelSection(tp=2))
    with record(layout) as messages:
        layout.all_reduce(torch.zeros(3, dtype=torch.float64))
        rows = [torch.zeros(2) for _ in range(4)]
        dist.all_gather(rows, torch.ones(2), group=layout.cpu_group)
        if layout.leaders is not None:
            out, splits = torch.zeros(6), [2, 4] if layout.dp_rank == 0 else [4, 2]
            dist.all_to_all_single(out, torch.ones(6), splits, splits, group=layout.leaders)
        dist.all_reduce(torch.zeros(100), group=layout.tp_group)  # a device's group
        layout.broadcast_object("x" * 100)
    dist.barrier()
    return [(m.kind, m.group_size, m.sent, m.received, m.caller.split()[-1], m.is_object) for m in messages]


def test_the_log_has_each_message_over_the_host_groups_once_with_its_bytes_and_caller():
    leader, other, *_ = run_ranks(logged, 4)
    exchange = [("isend", 4, 24, 0, "logged", False), ("irecv", 4, 0, 24, "logged", False)] * 2
    gather = ("all_gather", 4, 8, 24, "logged", False)
    assert other[:-1] == [*exchange, gather]
    assert leader[:-1] == [*exchange, gather, ("all_to_all_single", 2, 16, 16, "logged", False)]
    for log, source in ((leader, 2), (other, 3)):
        kind, size, *_, caller, is_object = log[-1]
        assert (kind, size, caller, is_object) == ("broadcast_object_list", 4, "logged", True)
        assert log[-1][source] > 100 and log[-1][5 - source] == 0
