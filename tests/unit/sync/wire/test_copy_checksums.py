"""Copies with checksums: they copy any strides, and their checksum equals the naive sum over elements."""

import itertools

import numpy as np
import pytest
import torch

from megagrpo.models.families.boxes import cut, extent, whole
from megagrpo.sync.wire.copy_checksums import (
    checksum,
    copy_checked,
    device_checksum,
    finite_as,
    first_false,
    on_host,
)

DTYPES = [torch.bfloat16, torch.float32]


def naive(values, column=0):
    """Each element's bits, shifted by its place within 8 bytes of its row."""
    bits = values.contiguous().view(torch.int16 if values.element_size() == 2 else torch.int32).numpy()
    width, lanes = 8 * values.element_size(), 8 // values.element_size()
    total = 0
    for place, value in np.ndenumerate(bits):
        total += (int(value) % 2**width) << width * ((place[-1] + column if place else column) % lanes)
    return total % 2**64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (8,), (3, 4), (7, 5), (2, 3, 8), (0, 4)], ids=str)
def test_the_checksum_is_the_naive_sum(shape, dtype):
    torch.manual_seed(0)
    values = torch.randn(shape).to(dtype)
    assert checksum(values) == naive(values)
    if values.dim() > 1:
        assert checksum(values.transpose(0, 1)) == naive(values.transpose(0, 1))
        assert checksum(values[:, 1:], 1) == naive(values[:, 1:], 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("edges", [(4, 8), (1, 7), (3, 4)])
def test_the_checksums_of_parts_add_up_and_tell_what_changed(edges, dtype):
    torch.manual_seed(1)
    values = torch.randn(6, 12).to(dtype)
    columns = [0, *edges, 12]
    parts = [(slice(a, b), slice(c, d)) for a, b in ((0, 2), (2, 6)) for c, d in itertools.pairwise(columns)]
    assert sum(checksum(values[part], part[1].start) for part in parts) % 2**64 == checksum(values)
    for change in (lambda v: v[3, 7:9].copy_(v[3, 7:9].flip(0)), lambda v: v[5, 11].zero_(), lambda v: v[0, 0].neg_()):
        other = values.clone()
        change(other)
        assert checksum(other) != checksum(values)


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


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("kind", SOURCES)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -float("nan")])
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 1, 5])
@pytest.mark.parametrize("width", [0, 3, 8, 1001])
def test_a_gpus_checksum_is_the_hosts(dtype, column, width):
    # sign bits make large sums
    values = -torch.rand(7, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    sums = [device_checksum(part, column) for part in (values, values[:, 1:], values.t())]
    assert on_host(sums) == [checksum(part, column) for part in (values, values[:, 1:], values.t())]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_tensor_that_is_not_finite_is_found_with_one_transfer(value):
    good, bad, empty = torch.ones(5), torch.tensor([1.0, value]), torch.ones(0, 3)
    assert first_false([finite_as(tensor, torch.float32) for tensor in (good, empty, bad, bad)]) == 2
    assert first_false([finite_as(good, torch.float32)]) is None and first_false([]) is None
