"""Chains of servers: which worker feeds which, for as many chains as the ranks can feed."""

import random

from megagrpo.sync.trainer_side.send_plan import NO_FEEDER, feeders, heads
from tests.unit.for_each import for_each


def test_four_alike_servers_of_two_workers_behind_one_or_more_ranks():
    boxes = ["left", "right"] * 4
    assert feeders(boxes, [2] * 4, 1) == [-1, -1, 0, 1, 2, 3, 4, 5]  # one chain
    assert feeders(boxes, [2] * 4, 4) == [-1, -1, -1, -1, 0, 1, 2, 3]  # two chains
    assert feeders(boxes, [2] * 4, 8) == [NO_FEEDER] * 8  # the ranks send as fast as the workers receive
    assert heads([-1, -1, -1, -1, 0, 1, 2, 3]) == [0, 1, 2, 3, 0, 1, 2, 3]


@for_each("seed", range(20))
def test_every_chain_joins_alike_servers_and_every_worker_feeds_at_most_one(seed):
    dice = random.Random(seed)
    layouts = [[f"{kind}{worker}" for worker in range(dice.randint(1, 4))] for kind in "abc"]
    chosen = [dice.choice(layouts) for _ in range(dice.randint(1, 30))]
    boxes, servers = [key for keys in chosen for key in keys], list(map(len, chosen))
    ranks = dice.randint(1, 2 * len(boxes))
    feeder = feeders(boxes, servers, ranks)
    fed = [source for source in feeder if source != NO_FEEDER]
    assert len(set(fed)) == len(fed) and all(source < worker for worker, source in enumerate(feeder))
    assert all(boxes[source] == boxes[worker] for worker, source in enumerate(feeder) if source != NO_FEEDER)
    assert all(feeder[head] == NO_FEEDER and boxes[head] == boxes[worker] for worker, head in enumerate(heads(feeder)))
    kinds, sent_to = len(set(map(tuple, chosen))), len(boxes) - len(fed)
    assert sent_to <= max(ranks, 4 * kinds)  # so no rank sends more than a worker receives, but for the first chains
    assert not fed or ranks < len(boxes)
