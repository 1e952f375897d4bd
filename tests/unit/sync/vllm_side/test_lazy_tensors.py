"""Lazy tensors against real ones: after any operation of a loader before its copy, the same elements arrive."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megagrpo.families.shared.boxes import cut, extent, whole
from megagrpo.sync.vllm_side.lazy_tensors import LazyTensor, box_of, restride
from megagrpo.sync.vllm_side.memory_receiver import MappedBlocks, SharedFiles
from megagrpo.sync.vllm_side.reader import ShardReader
from megagrpo.sync.wire.copy_checksums import checksum
from megagrpo.sync.wire.progress_file import VERSION_SHIFT, ProgressReader, progress_path
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.tensor_index import SharedBlock, SharedTensor, TensorIndex
from tests.unit.for_each import for_each

LOADERS = {
    "whole": lambda t: t,
    "rows": lambda t: t.narrow(0, 3, 4),
    "columns": lambda t: t.narrow(1, 2, 5),
    "one row": lambda t: t[5],
    "one element": lambda t: t[5, 3],
    "both": lambda t: t[2:9, 1:7],
    "steps": lambda t: t[1::3, ::2],
    "transposed": lambda t: t.t(),
    "transposed part": lambda t: t[4:8].t()[2:6],
    "transposed, made contiguous": lambda t: t[4:8].t().contiguous(),
    "heads": lambda t: t.view(4, 3, 8)[1:3],
    "heads, middle": lambda t: t.view(4, 3, 8)[:, 1],
    "split columns": lambda t: t.view(12, 2, 4)[:, 1],
    "flat": lambda t: t.view(-1)[5:60],
    "chunk": lambda t: t.chunk(3)[1],
    "unsqueezed": lambda t: t.unsqueeze(0)[:, 2:4],
    "repeated": lambda t: t[2:3].expand(4, 8),
    "permuted rows": lambda t: permuted(t),
    "permuted rows, one head": lambda t: permuted(t).narrow(0, 6, 6),
    "permuted rows, part of a head": lambda t: permuted(t)[1:5],
    "permuted rows, columns": lambda t: permuted(t)[:, 2:5],
    "permuted rows, cloned and flat": lambda t: permuted(t)[6:].clone().view(-1),
}


def permuted(t):
    """Put the even rows of each of two heads before its odd ones, as vLLM's Llama 4 does."""
    return t.view(2, 3, 2, 8).transpose(1, 2).reshape(12, 8)


class Recorder:
    """A source that has the tensor and records the requested parts."""

    def __init__(self, real):
        self.real, self.boxes = real, []

    def announce(self, name, view, destination):
        pass

    def fetch(self, name, view):
        box, strides = box_of(view, self.real.shape)
        self.boxes.append(box)
        part = self.real[tuple(slice(a, b) for a, b in zip(*box, strict=True))].contiguous()
        return restride(part, view, strides)

    def fill(self, name, view, destination):
        destination.copy_(self.fetch(name, view))


@for_each("name", LOADERS)
def test_a_loader_copies_the_same_elements_from_a_lazy_tensor(name):
    real = torch.arange(96, dtype=torch.float32).view(12, 8)
    source = Recorder(real)
    expected = LOADERS[name](real)
    arrived = torch.full_like(expected.contiguous(), -1)
    arrived.copy_(LOADERS[name](LazyTensor.of("w", real.shape, real.dtype, source)))
    torch.testing.assert_close(arrived, expected, rtol=0, atol=0)


def test_only_the_rows_or_columns_that_are_copied_are_fetched():
    source = Recorder(torch.zeros(12, 8))
    lazy = LazyTensor.of("w", (12, 8), torch.float32, source)
    torch.empty(4, 8).copy_(lazy[4:8])
    torch.empty(12, 2).copy_(lazy.narrow(1, 6, 2))
    torch.empty(6, 8).copy_(permuted(lazy)[6:])
    assert source.boxes == [cut((12, 8), 0, 4, 8), cut((12, 8), 1, 6, 8), cut((12, 8), 0, 6, 12)]


def test_arithmetic_on_a_lazy_tensor_computes_with_its_elements():
    real = torch.randn(12, 8)
    lazy = LazyTensor.of("w", real.shape, real.dtype, Recorder(real))
    torch.testing.assert_close(lazy[:3] * 2 + 1, real[:3] * 2 + 1)
    assert torch.equal(lazy.to(torch.bfloat16), real.to(torch.bfloat16))


def test_what_would_change_a_lazy_tensor_is_refused():
    with pytest.raises(NotImplementedError, match="w: a weight loader modifies its input tensor"):
        LazyTensor.of("w", (4, 4), torch.float32, Recorder(torch.ones(4, 4))).zero_()


def test_a_meta_destination_needs_no_elements():
    source = Recorder(torch.zeros(4, 4))
    torch.empty(4, 4, device="meta").copy_(LazyTensor.of("w", (4, 4), torch.float32, source))
    assert source.boxes == []


@pytest.fixture
def published(tmp_path):
    """A [6, 4] tensor as two row blocks of ranks 0 and 1, and the real tensor."""
    real = torch.randn(6, 4)
    blocks = []
    for rank, (start, stop) in enumerate([(0, 2), (2, 6)]):
        file = tmp_path / f"rank{rank}"
        file.write_bytes(b"\0" * 64 + real[start:stop].numpy().tobytes())
        blocks.append(SharedBlock(rank, str(file), 64, cut(real.shape, 0, start, stop), 0))
    return TensorIndex(7, "float32", {"w": SharedTensor((6, 4), tuple(blocks))}), real


def reader_of(tensor_index, files=None):
    """A reader of blocks that are all written."""
    folder = Path(next(iter(tensor_index.tensors.values())).blocks[0].file).parent
    for rank in range(2):
        progress_path(folder, rank, tensor_index.version).write_bytes(
            np.uint64((tensor_index.version << VERSION_SHIFT) + 1000).tobytes()
        )
    return ShardReader(
        MappedBlocks(tensor_index, 0, files or SharedFiles(), ProgressReader(folder, tensor_index.version))
    )


def test_a_reader_puts_slices_of_several_blocks_together_and_keeps_the_books(published):
    tensor_index, real = published
    reader = reader_of(tensor_index)
    lazy = next(reader.tensors())[1]
    arrived = torch.empty(4, 4)
    torch.empty(4, 4, device="meta").copy_(lazy[1:5])
    arrived.copy_(lazy[1:5])
    assert torch.equal(arrived, real[1:5]) and reader.bytes == arrived.nbytes and not reader.unread()
    assert reader.reads == {
        ("w", 0, ((1, 0), (2, 4))): checksum(real[1:2], ((1, 0), (2, 4))),
        ("w", 1, ((2, 0), (5, 4))): checksum(real[2:5], ((2, 0), (5, 4))),
    }


def test_a_box_that_was_announced_and_never_copied_is_told(published):
    reader = reader_of(published[0])
    torch.empty(2, 4, device="meta").copy_(next(reader.tensors())[1][:2])
    assert reader.unread() == ["w[0:2, 0:4]"]


def test_zeros_in_place_of_a_tensor_arrive_and_are_not_read(published):
    reader = reader_of(published[0])
    arrived = torch.ones(2, 4)
    arrived.copy_(torch.zeros_like(next(reader.tensors())[1][:2]))
    assert not arrived.any() and reader.bytes == 0 and not reader.unread()
    assert [sum(places.values()) for places in reader.arrivals.values()] == [8]


def test_zeros_in_the_place_of_zeros_arrive_too(published):
    reader = reader_of(published[0])
    arrived = torch.ones(2, 4)
    arrived.copy_(torch.zeros_like(torch.zeros_like(next(reader.tensors())[1][:2])))
    assert not arrived.any() and [sum(regions.values()) for regions in reader.arrivals.values()] == [8]


def test_a_block_that_is_not_published_is_named(published):
    tensor_index, _ = published
    half = TensorIndex(7, "float32", {"w": SharedTensor((6, 4), tensor_index.tensors["w"].blocks[:1])})
    lazy = next(reader_of(half).tensors())[1]
    with pytest.raises(WeightSyncError, match=r"w: no rank holds \[2:6, 0:4\]"):
        torch.empty(6, 4, device="meta").copy_(lazy)


def test_a_missing_or_short_file_names_rank_and_tensor(published, tmp_path):
    (tmp_path / "rank1").write_bytes(b"\0" * 100)
    with pytest.raises(WeightSyncError, match=r"rank 1, w: .* holds 100 bytes"):
        reader_of(published[0])
    (tmp_path / "rank1").unlink()
    with pytest.raises(WeightSyncError, match=r"rank 1, w: .* cannot be read: No such file"):
        reader_of(published[0])


def test_a_file_that_was_replaced_is_mapped_again(published, tmp_path):
    tensor_index, real = published
    maps = SharedFiles()
    reader_of(tensor_index, maps)
    data = (tmp_path / "rank0").read_bytes()
    (tmp_path / "rank0").unlink()
    (tmp_path / "rank0").write_bytes(data[:64] + (real[0:2] + 1).numpy().tobytes())
    arrived = torch.empty(2, 4)
    arrived.copy_(next(reader_of(tensor_index, maps).tensors())[1][:2])
    assert torch.equal(arrived, real[:2] + 1)


def test_an_index_reads_back_as_it_was_written(published, tmp_path):
    published[0].save(tmp_path / "index.json")
    assert TensorIndex.load(tmp_path / "index.json", 7) == published[0]
    assert published[0].num_bytes == 96 and extent(whole((6, 4))) == (6, 4)


@for_each("dim", [0, 1])
@for_each("name", LOADERS)
def test_what_a_loader_copies_from_several_blocks_arrives_with_checksums_of_the_parts(name, dim, tmp_path):
    real, blocks = torch.randn(12, 8), []
    for rank, (start, stop) in enumerate([(0, 3), (3, 8 if dim else 12)]):
        held = real.narrow(dim, start, stop - start).contiguous()
        (tmp_path / f"rank{rank}").write_bytes(held.numpy().tobytes())
        blocks.append(SharedBlock(rank, str(tmp_path / f"rank{rank}"), 0, cut(real.shape, dim, start, stop), 0))
    reader = reader_of(TensorIndex(1, "float32", {"w": SharedTensor((12, 8), tuple(blocks))}))
    expected = LOADERS[name](real)
    arrived = torch.full_like(expected.contiguous(), -1)
    arrived.copy_(LOADERS[name](next(reader.tensors())[1]))
    torch.testing.assert_close(arrived, expected, rtol=0, atol=0)
    for (_, _, (lo, hi)), total in reader.reads.items():
        assert total == checksum(real[lo[0] : hi[0], lo[1] : hi[1]].contiguous(), (lo, hi))
