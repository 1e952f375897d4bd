"""Slices in messages: in any layout each wanted element is in one message, and there is no deadlock."""

import itertools
import random
from collections import Counter

from megagrpo.families.shared.boxes import cut, intersect, missing, size, whole
from megagrpo.sync.trainer_side.send_plan import PlanNews, messages_of
from megagrpo.sync.wire.messages import pieces, rounds
from megagrpo.sync.wire.rank_boxes import RankBoxes, by_tensor
from megagrpo.weights.slices.sync_plan import plan_transfers
from tests.unit.for_each import for_each


def cuts_of(shape, dice):
    """The whole tensor, or even or uneven parts along one dimension."""
    dim, count = dice.randrange(len(shape)), dice.choice([1, 2, 3])
    marks = sorted({0, shape[dim], *(dice.randrange(1, shape[dim]) for _ in range(count - 1))})
    return [cut(shape, dim, a, b) for a, b in itertools.pairwise(marks)]


def random_sync(dice):
    """Shapes, holders and readers."""
    num_ranks, num_workers = dice.randint(1, 5), dice.randint(1, 4)
    names = [f"model.layers.{layer}.{part}" for layer in range(3) for part in "ab"] + ["embed", "head"]
    shapes = {name: tuple(dice.randint(2, 9) for _ in range(dice.randint(1, 3))) for name in names}
    held, wanted = {}, {}
    for name, shape in shapes.items():
        for box in cuts_of(shape, dice):
            held.setdefault(name, {})[box] = sorted(dice.sample(range(num_ranks), dice.randint(1, num_ranks)))
        for worker in range(num_workers):
            for box in dice.sample(parts := cuts_of(shape, dice), dice.randint(0, len(parts))):
                wanted.setdefault(name, {}).setdefault(box, []).append(worker)
    return held, wanted, num_ranks, num_workers


@for_each("seed", range(60))
def test_every_wanted_element_is_in_one_message_from_a_rank_that_has_it(seed):
    dice = random.Random(seed)
    held, wanted, *_ = random_sync(dice)
    limit = dice.choice([1, 7, 40, 10**6])
    arrived = {}
    for messages in rounds(plan_transfers(held, wanted), limit).values():
        for message in messages:
            assert message.elements == sum(size(item.box) for item in message.slices) <= limit
            offsets = [item.offset for item in message.slices]
            assert offsets == [sum(size(item.box) for item in message.slices[:i]) for i in range(len(offsets))]
            for item in message.slices:
                holders = [box for box, ranks in held[item.tensor].items() if message.source in ranks]
                assert any(intersect(box, item.box) == item.box for box in holders)
                arrived.setdefault((item.tensor, message.destination), []).append(item.box)
    for name, boxes in wanted.items():
        for worker in {w for workers in boxes.values() for w in workers}:
            own = [box for box, workers in boxes.items() if worker in workers]
            parts = arrived.pop((name, worker))
            assert all(not missing(box, parts) for box in own) and sum(map(size, parts)) == sum(map(size, own))
    assert not arrived


@for_each("seed", range(20))
def test_both_ends_of_every_pair_see_the_same_messages_in_the_same_order(seed):
    dice = random.Random(seed)
    held, wanted, num_ranks, num_workers = random_sync(dice)
    transfers, limit = plan_transfers(held, wanted), dice.choice([3, 25, 10**6])
    sent = [[m for found in rounds(transfers, limit, source=rank).values() for m in found] for rank in range(num_ranks)]
    taken = [
        [m for found in rounds(transfers, limit, destination=w).values() for m in found] for w in range(num_workers)
    ]
    for rank in range(num_ranks):
        for worker in range(num_workers):
            out = [message for message in sent[rank] if message.destination == worker]
            assert out == [message for message in taken[worker] if message.source == rank]
            assert [message.tag for message in out] == list(range(len(out)))


@for_each("seed", range(20))
def test_a_rank_and_a_worker_find_their_messages_from_their_own_boxes(seed):
    dice = random.Random(seed)
    held, wanted, num_ranks, num_workers = random_sync(dice)
    rank_boxes, limit = RankBoxes({name: ((), boxes) for name, boxes in held.items()}), dice.choice([3, 25, 10**6])
    workers = {
        worker: by_tensor((name, box) for name, boxes in wanted.items() for box in boxes if worker in boxes[box])
        for worker in range(num_workers)
    }
    choices = rank_boxes.choices(rank_boxes.sources_for(workers))
    whole_plan = rank_boxes.transfers_to(workers)
    for rank in range(num_ranks):
        own = {name for name, boxes in held.items() if any(rank in ranks for ranks in boxes.values())}
        found = messages_of(PlanNews(1, workers, choices), rank_boxes, rank, own, limit)
        assert found == rounds(whole_plan, limit, source=rank)
    for worker, boxes in workers.items():
        of_worker = rank_boxes.sources(choices[choices[:, 0] == worker])
        found = rounds(rank_boxes.transfers_to({worker: boxes}, of_worker), limit, destination=worker)
        assert found == rounds(whole_plan, limit, destination=worker)


@for_each("seed", range(20))
@for_each("in_flight", [1, 2])
def test_transfers_never_deadlock(seed, in_flight):
    """Simulate both ends. Each has a limited number of rounds in flight and continues when its oldest is done. A
    message is done when both ends have it in flight."""
    dice = random.Random(seed)
    held, wanted, num_ranks, num_workers = random_sync(dice)
    transfers, limit = plan_transfers(held, wanted), dice.choice([2, 11, 10**6])
    ends = [list(rounds(transfers, limit, source=rank).values()) for rank in range(num_ranks)]
    ends += [list(rounds(transfers, limit, destination=worker).values()) for worker in range(num_workers)]
    posted, begun = Counter(), [0] * len(ends)
    finished = [0] * len(ends)
    while any(done < len(todo) for done, todo in zip(finished, ends, strict=True)):
        before = begun + finished
        for i, todo in enumerate(ends):
            while begun[i] < min(len(todo), finished[i] + in_flight):
                posted.update(todo[begun[i]])
                begun[i] += 1
            if finished[i] < begun[i] and all(posted[message] == 2 for message in todo[finished[i]]):
                finished[i] += 1
        assert begun + finished != before, "everybody waits"


def test_a_slice_larger_than_a_message_is_cut_into_contiguous_parts_in_order():
    box = ((2, 0, 3), (5, 4, 8))  # 3 x 4 x 5
    for limit in (1, 4, 5, 12, 20, 59, 60):
        parts = pieces(box, limit)
        assert all(size(part) <= limit for part in parts) and sum(map(size, parts)) == 60 and not missing(box, parts)
        assert parts == sorted(parts)
    assert pieces(box, 60) == [box] and pieces(box, 20) == [((i, 0, 3), (i + 1, 4, 8)) for i in (2, 3, 4)]
    assert pieces(whole(()), 1) == [whole(())]
