"""Metrics over micro-batches, ranks and optimizer steps, against the naive formula over all tokens."""

import random
import statistics

import pytest
import torch
from ranks import run_ranks

from megagrpo.config import ParallelSection
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.metric_sums import MetricsOfRanks, merged, on_host
from megagrpo.records.rows.step_metrics import reduce_updates, values_of
from megagrpo.train_types import Metric
from tests.message_log import objects, record
from tests.unit.for_each import for_each


def parts(seed):
    """Numbers of the tokens of some micro-batches; one of them has no token."""
    draw = random.Random(seed)
    return [[draw.uniform(-2, 2) for _ in range(count)] for count in (draw.randint(1, 9), 0, draw.randint(1, 9), 1)]


def of(tokens):
    """The metrics of a micro-batch with these tokens, as a loss makes them."""
    row = torch.tensor(tokens)
    extremes = (row.max(), row.min()) if tokens else (torch.tensor(-torch.inf), torch.tensor(torch.inf))
    return {
        "average": Metric(row.sum(), torch.tensor(float(len(tokens)))),
        "a name that says min/max": Metric(extremes[0], torch.tensor(float(len(tokens))), "max"),
        "largest/max": Metric(extremes[1], torch.tensor(float(len(tokens))), "min"),
    }


@for_each("seed", range(20))
def test_every_metric_is_reduced_as_it_says_and_its_name_says_nothing(seed):
    batches = parts(seed)
    everyone = [token for tokens in batches for token in tokens]
    ranks = [merged(on_host([of(tokens) for tokens in rank])[0]) for rank in (batches[:2], batches[2:])]
    found = values_of(merged(ranks))
    assert found["average"] == pytest.approx(statistics.fmean(everyone), rel=1e-6, abs=1e-6)
    assert found["a name that says min/max"] == pytest.approx(max(everyone)) and found["largest/max"] == pytest.approx(
        min(everyone)
    )


def test_the_counts_of_all_parts_add_up_so_that_a_metric_without_tokens_shows():
    assert merged(on_host([of([]), of([])])[0])["average"].count == 0
    assert merged(on_host([of([1.0]), of([])])[0])["average"].count == 1


def test_flags_come_to_the_host_with_the_metrics():
    metrics, flags = on_host(
        [{"one": Metric(torch.tensor(2.5))}, {}], torch.tensor([True, False]), torch.tensor([], dtype=torch.bool)
    )
    assert metrics == [{"one": Metric(2.5, 1.0)}, {}] and flags == [[True, False], []]
    assert on_host([], torch.tensor([False])) == ([], [[False]])


def test_optimizer_steps_combine_as_each_metric_says_over_those_that_report_it():
    one = {
        "loss": Metric(6.0, 3),
        "rate": Metric(0.1, reduce="last"),
        "far": Metric(5.0, 9, "max"),
        "near": Metric(-1.0, 9, "min"),
    }
    two = {
        "loss": Metric(1.0, 4),
        "rate": Metric(0.2, reduce="last"),
        "far": Metric(4.0, 9, "max"),
        "near": Metric(-3.0, 9, "min"),
    }
    assert reduce_updates([one, two, {"norm": Metric(7.0)}]) == dict(loss=1.125, rate=0.2, far=5.0, near=-3.0, norm=7.0)


def test_the_last_of_two_parts_is_the_later_one():
    assert Metric(0.1, reduce="last").merge(Metric(0.2, reduce="last")).value == 0.2


# what each of four ranks measures in a step: tp rank 1 of each replica (ranks 1 and 3) has nothing
STEPS = [
    {0: {"loss": Metric(0.1, 3.0), "far": Metric(2.0, 3.0, "max")}, 2: {"loss": Metric(0.2, 4.0)}},
    {
        0: {"loss": Metric(-0.0, 0.0), "rate": Metric(0.5, 1.0, "last"), "near": Metric(-1.0, 2.0, "min")},
        2: {"near": Metric(-3.0, 1.0, "min"), "rate": Metric(0.25, 1.0, "last"), "new": Metric(7.0)},
    },
    {0: {"loss": Metric(float("nan"), 3.0), "far": Metric(2.0, 3.0, "max")}, 2: {"loss": Metric(1.0, 1.0)}},
    {},
]


def merge_steps():
    layout = init_layout(ParallelSection(tp=2))
    ranks = MetricsOfRanks(layout)
    results = []
    for number, step in enumerate(STEPS):
        with record(layout) as messages:
            mine = step.get(layout.world_rank, {})
            results.append((*ranks.merge(mine, layout.world_rank == number, False), len(objects(messages))))
    return results


def test_ranks_merge_their_metrics_with_the_bits_of_one_merge_and_send_only_new_names_as_objects():
    for results in run_ranks(merge_steps, 4):
        for step, (metrics, flags, _) in zip(STEPS, results, strict=True):
            assert repr(sorted(metrics.items())) == repr(sorted(merged([*step.values()]).items()))
            assert flags == [True, False]
        assert [objects_sent for *_, objects_sent in results] == [1, 2, 0, 0]
