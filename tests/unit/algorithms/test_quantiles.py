"""A quantile over ranks is the one that a sort of all values gives, bit for bit."""

import math

import torch

from megagrpo.algorithms.entropy import quantile
from tests.unit.for_each import for_each

SIZES = [(1,), (2,), (0, 3), (1, 1), (5, 0, 7), (100, 1), (40, 41, 42, 0)]


def sorted_quantile(values: torch.Tensor, fraction: float) -> float:
    ordered = values.sort().values
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    return ordered[below].lerp(ordered[min(below + 1, len(ordered) - 1)], position - below).item()


def over_ranks(parts: list[torch.Tensor], fraction: float) -> float:
    """Run the quantile of every rank in lockstep: the reductions are over recorded messages of all ranks."""
    sent: list[list[torch.Tensor]] = [[] for _ in parts]
    while True:
        results = []
        for part in parts:
            replies = [
                torch.stack(row).sum(0) if number < 3 else torch.stack(row).amin(0)
                for number, row in enumerate(zip(*sent, strict=True))
            ]
            asked = []

            def all_reduce(values, _, asked=asked, replies=replies):
                asked.append(values)
                if len(asked) > len(replies):
                    raise StopIteration
                return replies[len(asked) - 1]

            try:
                results.append(quantile(part, fraction, all_reduce))
            except StopIteration:
                results.append(asked[-1])
        if not isinstance(results[0], torch.Tensor):
            assert len(set(results)) == 1 or all(map(math.isnan, results)), "ranks have different quantiles"
            return results[0]
        for rank, values in enumerate(results):
            sent[rank].append(values)


@for_each("kind", ["uniform", "equal", "steps", "signs", "wide"])
@for_each("sizes", SIZES)
def test_the_quantile_over_ranks_has_the_bits_of_a_sort(kind, sizes):
    draw = torch.Generator().manual_seed(sum(sizes))
    values = torch.rand(sum(sizes), generator=draw)
    values = {
        "uniform": values,
        "equal": torch.full_like(values, 0.25),
        "steps": (values * 3).floor() / 3,
        "signs": values - 0.5,
        "wide": torch.exp(80 * (values - 0.5)) * (values - 0.5).sign(),
    }[kind]
    for fraction in (0.0, 0.1, 0.5, 0.8, 0.99, 1.0):
        assert over_ranks(list(values.split(sizes)), fraction) == sorted_quantile(values, fraction)


def test_infinities_and_nan_are_in_the_order_of_a_sort():
    values = torch.tensor([math.nan, 1.0, -math.inf, math.inf, -0.0, 0.0])
    for fraction in (0.0, 0.3, 0.5, 0.6, 0.9, 1.0):
        found, expected = over_ranks([values[:3], values[3:]], fraction), sorted_quantile(values, fraction)
        assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_no_values_have_no_quantile():
    assert math.isnan(over_ranks([torch.zeros(0), torch.zeros(0)], 0.5))
