"""Which gradients are finite, found without a copy of them."""

import torch

from megagrpo.policy.find_nan import _finite
from tests.unit.for_each import for_each


@for_each("bad", [float("nan"), float("inf"), float("-inf")])
@for_each("place", [0, 4095, 99999])
def test_one_bad_element_is_seen_wherever_it_is(bad, place):
    tensors = [torch.randn(100_000), torch.randn(100_000), torch.randn(3, 5)]
    tensors[1][place] = bad
    assert _finite(tensors).tolist() == [True, False, True]


def test_the_largest_finite_numbers_are_finite():
    most = torch.finfo(torch.float32).max
    assert _finite([torch.tensor([most, -most, most])]).tolist() == [True]


def test_a_rank_without_parameters_checks_nothing():
    assert _finite([]).tolist() == []
