"""Tensors that wait in host memory take their exact bytes in pieces of powers of two, and come back bit for bit."""

import random

import torch

from megagrpo.platform.device import host_copies
from megagrpo.platform.device.host_copies import HostCopies, HostPieces, host_parts


def test_pieces_are_powers_of_two_and_waste_less_than_one(monkeypatch):
    monkeypatch.setattr(host_copies, "PINNED_PIECE_BYTES", 64)
    asked: list[int] = []
    host_bytes = host_copies.device.host_bytes
    monkeypatch.setattr(host_copies.device, "host_bytes", lambda count: asked.append(count) or host_bytes(count))
    draw = random.Random(0)
    for _ in range(50):
        asked.clear()
        sizes = [draw.choice([0, 1, 7, 33, 64, 65, 200]) for _ in range(draw.randint(1, 6))]
        parts = host_parts(sizes)
        assert [sum(part.numel() for part in each) for each in parts] == sizes
        assert all(count & (count - 1) == 0 for count in asked) and all(count == 64 for count in asked[:-1])
        assert sum(sizes) <= sum(asked) < sum(sizes) + 64


def test_tensors_that_stay_on_the_host_share_pieces_and_no_bytes(monkeypatch):
    monkeypatch.setattr(host_copies, "HOST_PIECE_BYTES", 2**12)
    asked: list[int] = []
    host_bytes = host_copies.device.host_bytes
    monkeypatch.setattr(host_copies.device, "host_bytes", lambda count: asked.append(count) or host_bytes(count))
    pieces, shapes = HostPieces(), [(3, 5), (0,), (7,), (1100,), (1,), (16, 16)] * 3
    dtypes = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8, torch.float32] * 3
    made = [pieces.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    assert [(tuple(each.shape), each.dtype) for each in made] == list(zip(shapes, dtypes, strict=True))
    assert not any(each.float().any() for each in made)
    for number, each in enumerate(made):
        each.fill_(number)
    assert all((each.float() == number).all() for number, each in enumerate(made))
    assert asked == [2**12, 2**13, 2**13, 2**13]  # of 4,400 bytes each, with the small ones behind them


def test_what_goes_to_the_host_comes_back(monkeypatch):
    monkeypatch.setattr(host_copies, "PINNED_PIECE_BYTES", 64)
    copies, sources = HostCopies(), [torch.arange(size, dtype=torch.uint8) for size in (100, 3, 0, 64, 130)]
    hosts, _ = copies.to_host(sources)
    back, _ = copies.to_device(hosts)
    assert all(torch.equal(one, other) for one, other in zip(back, sources, strict=True))
    hosts[0][0].fill_(255)  # parts are the host's memory, not views of the sources
    assert sources[0][0] == 0 and copies.to_device(hosts)[0][0][0] == 255
