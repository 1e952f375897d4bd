"""Copies with checksums: they copy any strides, and their checksum equals the naive sum over elements."""

import itertools
import math

import numpy as np
import pytest
import torch

from megagrpo.families.shared.boxes import cut, extent, whole
from megagrpo.sync.wire import copy_checksums
from megagrpo.sync.wire.copy_checksums import (
    PIECE,
    checksum,
    copy_checked,
    device_checksum,
    finite_as,
    first_false,
    on_host,
    position_weights,
)
from tests.unit.for_each import for_each

DTYPES = [torch.bfloat16, torch.float32]


def splitmix64(number):
    """The generator of the position weights, with Python's integers."""
    number = number * 0x9E3779B97F4A7C15 % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = (number ^ number >> shift) * factor % 2**64
    return number ^ number >> 31


def weight(dim, index):
    """The weight of an index along a dimension, counted from the last one."""
    return splitmix64(index + (dim << 40)) | 1


def naive(values, first=None):
    """Each element's bits, shifted by its place within 8 bytes of its row, times the weight of its word."""
    values = values if values.dim() else values[None]
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[values.element_size()]
    width, lanes = 8 * values.element_size(), 8 // values.element_size()
    total = 0
    for place, value in np.ndenumerate(values.contiguous().view(integers).numpy()):
        *rows, column = (a + b for a, b in zip(place, first or [0] * len(place), strict=True))
        factor = math.prod(weight(dim, index) for dim, index in enumerate(reversed([*rows, column // lanes])))
        total += (int(value) % 2**width << width * (column % lanes)) * factor
    return total % 2**64


def part_of(values, box):
    return values[tuple(slice(a, b) for a, b in zip(*box, strict=True))]


@for_each("dtype", [*DTYPES, torch.float8_e4m3fn])
@for_each("shape", [(), (1,), (5,), (8,), (3, 4), (7, 5), (2, 3, 8), (0, 4), (3, 0)])
def test_the_checksum_is_the_naive_sum(shape, dtype):
    torch.manual_seed(0)
    values = torch.randn(shape).to(dtype)
    assert checksum(values) == naive(values)
    if values.dim() > 1:
        assert checksum(values.transpose(0, 1)) == naive(values.transpose(0, 1))
        assert checksum(values[:, 1:], cut(shape, 1, 1, shape[1])) == naive(values[:, 1:], [0, 1, 0][: len(shape)])


@for_each("dtype", [*DTYPES, torch.float8_e5m2])
@for_each("edges", [(4, 8), (1, 7), (1, 9), (3, 4)])
@for_each("experts", [None, 3])
def test_the_checksums_of_parts_add_up(edges, dtype, experts):
    torch.manual_seed(1)
    shape = (6, 16) if experts is None else (experts, 6, 16)
    values = torch.randn(shape).to(dtype)
    boxes = [((a, c), (b, d)) for a, b in ((0, 2), (2, 6)) for c, d in itertools.pairwise([0, *edges, 16])]
    if experts is not None:
        boxes = [((e, *lo), (f, *hi)) for e, f in ((0, 1), (1, 3)) for lo, hi in boxes]
    assert (
        sum(checksum(part_of(values, box).clone(), box) for box in boxes) % 2**64 == checksum(values) == naive(values)
    )


def exchanged(values, dim, first, second):
    """A copy with two equal index ranges along `dim` exchanged."""
    result = values.clone()
    for here, there in ((first, second), (second, first)):
        result[(slice(None),) * dim + (here,)] = values[(slice(None),) * dim + (there,)]
    return result


PERMUTED = {
    "two rows": lambda v: exchanged(v, -2 % v.dim(), slice(1, 2), slice(4, 5)),
    "neighbouring rows": lambda v: exchanged(v, -2 % v.dim(), slice(2, 3), slice(3, 4)),
    "halves of the rows, as gate and up": lambda v: exchanged(v, -2 % v.dim(), slice(0, 4), slice(4, 8)),
    "halves of each row": lambda v: exchanged(v, -1 % v.dim(), slice(0, 16), slice(16, 32)),
    "two words of one row": lambda v: exchanged(v.view(-1), 0, slice(8, 16), slice(16, 24)).view(v.shape),
    "neighbouring elements": lambda v: exchanged(v.view(-1), 0, slice(5, 6), slice(6, 7)).view(v.shape),
    "elements of the same column": lambda v: exchanged(v.view(-1), 0, slice(5, 6), slice(37, 38)).view(v.shape),
    "rows in reverse order": lambda v: v.flip(-2),
    "the order of experts": lambda v: v.roll(1, 0),
    "a square of 8 rows and 8 columns, transposed": lambda v: torch.cat([v[..., :8].mT, v[..., 8:]], -1),
}


@for_each("dtype", [*DTYPES, torch.float8_e4m3fn])
@for_each("experts", [None, 4])
@for_each("kind", PERMUTED)
def test_a_permutation_changes_the_checksum(kind, experts, dtype):
    torch.manual_seed(3)
    shape = (8, 32) if experts is None else (experts, 8, 32)
    values = torch.randn(shape).to(dtype)
    permuted = PERMUTED[kind](values)
    assert not torch.equal(permuted.view(torch.uint8), values.view(torch.uint8))
    assert checksum(permuted) != checksum(values)


@pytest.mark.parametrize("kind", ["two rows", "halves of each row"])
def test_exchanged_parts_with_equal_sums_change_the_checksum(kind):
    """Each half holds the same elements in another order, so that the sums of both are equal."""
    row = torch.arange(1.0, 17.0)
    values = torch.cat([row, row.flip(0)]).expand(8, 32).contiguous()
    values[4] = values[4].roll(8)
    assert checksum(PERMUTED[kind](values)) != checksum(values)


@for_each("dtype", DTYPES)
@for_each("place", [(0, 0), (0, 3), (5, 11), (3, 8)])
def test_any_flipped_bit_of_an_element_changes_the_checksum(place, dtype):
    values = torch.randn(6, 12, generator=torch.Generator().manual_seed(4)).to(dtype)
    integers = torch.int16 if dtype is torch.bfloat16 else torch.int32
    totals = {checksum(values)}
    for bit in range(8 * values.element_size() - 1):
        other = values.clone()
        other.view(integers)[place] ^= 1 << bit
        totals.add(checksum(other))
    other = values.clone()
    other[place] = -other[place]
    assert len(totals | {checksum(other)}) == 8 * values.element_size() + 1


def test_weights_of_positions_are_odd_and_differ_between_dimensions():
    device = torch.device("cpu")
    of_dims = [position_weights(dim, 5, 1000, device) for dim in range(3)]
    numbers = [number for weights in of_dims for number in weights.tolist()]
    assert len(set(numbers)) == 3000 and all(number % 2 for number in numbers)
    assert of_dims[1].tolist() == position_weights(1, 0, 5000, device)[5:1005].tolist()  # from a larger table


SOURCES = {
    "rows": lambda: torch.randn(40, 24),
    "columns of a wider tensor": lambda: torch.randn(40, 64)[:, 8:32],
    "a finer view": lambda: torch.randn(5, 6, 8, 24)[:, 2:3],
    "transposed": lambda: torch.randn(24, 40).t(),
    "a vector": lambda: torch.randn(1000),
    "an odd width": lambda: torch.randn(9, 13),
    "one long row": lambda: torch.randn(1, 4096),
    "nothing": lambda: torch.randn(0, 8),
}


@for_each("to", DTYPES)
@for_each("kind", SOURCES)
def test_a_checked_copy_holds_the_source_and_tells_its_checksum(kind, to):
    torch.manual_seed(2)
    for dtype in DTYPES:
        source = SOURCES[kind]().to(dtype)
        shape = (source.numel() // source.shape[-1], source.shape[-1]) if source.dim() > 1 else tuple(source.shape)
        target = torch.full(shape, 7.0, dtype=to)
        total, seconds = copy_checked(target, source, whole(shape))
        assert (
            torch.equal(target, source.to(to).reshape(shape))
            and on_host([total]) == [checksum(target)] == [naive(target)]
            and seconds >= 0
        )


def test_a_part_of_a_tensor_adds_up_with_the_others():
    values = torch.randn(8, 20)
    total = 0
    for start, stop in ((0, 3), (3, 20)):
        box = cut((8, 20), 1, start, stop)
        total += int(copy_checked(torch.empty(extent(box)), values[:, start:stop], box).checksum)
    assert total % 2**64 == checksum(values)


@for_each("dtype", DTYPES)
@for_each("value", [float("nan"), float("inf"), float("-inf"), -float("nan")])
def test_what_is_not_finite_is_refused_wherever_it_lies(value, dtype):
    source = torch.zeros(300, 1000, dtype=dtype)
    source[0, 0] = torch.finfo(dtype).max
    assert finite_as(source, dtype)
    for place in ((0, 0), (299, 999), (150, 3)):
        bad = source.clone()
        bad[place] = value
        for seen in (bad, bad.t(), bad.view(300, 10, 100)[:, place[1] // 100]):
            assert not finite_as(seen, dtype)


@pytest.mark.parametrize("sign", [1, -1])
def test_what_the_cast_makes_infinite_is_refused(sign):
    largest, rounded = (
        sign * torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7F7F7FFF, 0x7F7F8000)
    )
    assert largest.bfloat16().isfinite() and not rounded.bfloat16().isfinite()
    assert finite_as(largest, torch.bfloat16) and finite_as(rounded, torch.float32)
    assert not finite_as(rounded, torch.bfloat16)


@for_each("dtype", DTYPES)
@for_each("column", [0, 1, 5])
@for_each("width", [0, 3, 8, 1001])
def test_a_gpus_checksum_is_the_hosts(dtype, column, width, monkeypatch):
    # sign bits make large sums
    values = -torch.rand(7, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    parts = [values, values[:, 1:], values.t()]
    boxes = [((2, column), (2 + part.shape[0], column + part.shape[1])) for part in parts]
    with monkeypatch.context() as patch:
        patch.setattr(copy_checksums, "is_host", lambda values: False)
        patch.setattr(copy_checksums, "_PRODUCTS", 100)
        sums = [device_checksum(part, box) for part, box in zip(parts, boxes, strict=True)]
    assert on_host(sums) == [checksum(part, box) for part, box in zip(parts, boxes, strict=True)]


def test_a_row_longer_than_a_piece_and_rows_of_several_pieces_have_the_sum_of_the_whole():
    for shape in ((PIECE + 12,), (3, PIECE // 2)):
        source = torch.randn(shape)
        target = torch.empty(source.numel(), dtype=torch.bfloat16)
        assert on_host([copy_checked(target, source, whole(shape)).checksum]) == [checksum(source.bfloat16())]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_tensor_that_is_not_finite_is_found_with_one_transfer(value):
    good, bad, empty = torch.ones(5), torch.tensor([1.0, value]), torch.ones(0, 3)
    assert first_false([finite_as(tensor, torch.float32) for tensor in (good, empty, bad, bad)]) == 2
    assert first_false([finite_as(good, torch.float32)]) is None and first_false([]) is None
