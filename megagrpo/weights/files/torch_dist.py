"""Reads and writes Megatron's distributed checkpoints (format torch_dist) tensor by tensor.

The format is torch.distributed.checkpoint's. Its own writer and reader, and Megatron's, hold all tensors of a rank at
once. Megatron's code handles everything except tensors. A file is a sequence of torch.save archives, one per piece of a
tensor; `.metadata` locates each piece. `data_only.py` reads that index."""

from __future__ import annotations

import io
import mmap
import os
import zipfile
from collections.abc import Buffer, Iterable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from megagrpo.families.shared.boxes import Box, intersect, size
from megagrpo.families.shared.vision import TOWER
from megagrpo.weights.files.data_only import NotPlainData, read_metadata, read_object
from megagrpo.weights.files.partial_files import Journal
from megagrpo.weights.files.tensor_files import dtype_name, mapped_tensor

FILE_BYTES = 4 * 2**30  # a file above this size is closed
ARCHIVE_BYTES = 2048  # upper bound of an archive's bytes beside the tensor
_COMMIT = 2**28  # bytes between two commits: a kill loses at most this much work
_ALIGN = 64
# first bytes of a zip archive's first and last records; bytes of the last one
_MARKS, _END = (b"PK\x03\x04", b"PK\x05\x06"), 22


@dataclass(frozen=True)
class Piece:
    """A piece of a stored tensor: its part of the tensor, and its position in a file."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    lo: tuple[int, ...]
    extent: tuple[int, ...]
    file: str
    offset: int
    length: int


class PieceWriter:
    """Appends tensors to this rank's files in `folder`. Parameters that the journal lists are kept from an earlier
    attempt: `done` has their names."""

    def __init__(self, folder: Path, rank: int, journal: Journal):
        self._folder, self._rank, self._journal = folder, rank, journal
        self.done = {line["name"]: [Piece(**piece) for piece in line["pieces"]] for line in journal.lines}
        ends: dict[str, int] = {}
        for piece in self.pieces:
            ends[piece.file] = max(ends.get(piece.file, 0), piece.offset + piece.length)
        # Megatron numbers its own files of a rank from 0
        self._number = max((_number(file) for file in ends), default=1)
        path = folder / self._name
        self._file = open(path, "r+b" if path.exists() else "wb")
        self._file.truncate(ends.get(self._name, 0))
        self._file.seek(0, os.SEEK_END)
        self._pending: list[dict[str, Any]] = []
        self._size = 0  # bytes of the pending pieces

    @property
    def pieces(self) -> list[Piece]:
        """All pieces written, in this attempt and in earlier ones."""
        return [piece for pieces in self.done.values() for piece in pieces]

    @property
    def _name(self) -> str:
        return f"__{self._rank}_{self._number}.distcp"

    def write(self, name: str, tensors: Iterable[ShardedTensor]) -> None:
        """Append the pieces of the parameter `name`; each has the data [local_shape] of one shard, in any dtype."""
        if self._file.tell() > FILE_BYTES:
            self._commit()
            self._file.close()
            self._number += 1
            self._file = open(self._folder / self._name, "wb")
        self.done[name] = [self._append(tensor) for tensor in tensors]
        self._pending.append({"name": name, "pieces": [asdict(piece) for piece in self.done[name]]})
        self._size += sum(piece.length for piece in self.done[name])
        if self._size > _COMMIT:
            self._commit()

    def _append(self, tensor: ShardedTensor) -> Piece:
        offset = self._file.seek(-(-self._file.tell() // _ALIGN) * _ALIGN)
        extent = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
        data = tensor.data.reshape(extent).contiguous()
        own = data.untyped_storage().nbytes() == data.nbytes  # torch.save writes a tensor's whole storage
        try:
            torch.save(data if own else _alone(data), self._file)
        except RuntimeError as error:
            # torch closes its archive after a failed write; the second failure hides the cause
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        part = (tuple(tensor.global_shape), dtype_name(data.dtype), tuple(tensor.global_offset), extent)
        return Piece(tensor.key, *part, self._name, offset, self._file.tell() - offset)

    def _commit(self) -> None:
        self._file.flush()
        os.fdatasync(self._file.fileno())
        self._journal.write(self._pending)
        self._pending, self._size = [], 0

    def close(self) -> None:
        """Sync everything to the disk and close the file."""
        self._commit()
        self._file.close()


def _number(file: str) -> int:
    return int(file.removesuffix(".distcp").rpartition("_")[2])


def _alone(data: Tensor) -> Tensor:
    """Return a contiguous part of a larger storage as a tensor with its own storage, over the same memory."""
    buffer = data.view(-1).view(torch.uint8).numpy()
    return torch.frombuffer(buffer, dtype=data.dtype).view(data.shape) if data.numel() else data.clone()


def add_pieces(folder: Path, pieces: Iterable[Piece]) -> None:
    """Add tensors to the metadata that Megatron has written for everything else."""
    metadata = read_metadata(folder)
    results = [WriteResult(index, 0, info) for index, info in metadata.storage_data.items()]
    for piece in pieces:
        properties = TensorProperties(dtype=getattr(torch, piece.dtype))
        fresh = TensorStorageMetadata(properties, torch.Size(piece.shape), [])
        whole = metadata.state_dict_metadata.setdefault(piece.key, fresh)
        assert isinstance(whole, TensorStorageMetadata), f"{piece.key} is not a tensor"
        assert whole.size == torch.Size(piece.shape), f"{piece.key}: {whole.size} and {piece.shape}"
        index = MetadataIndex(piece.key, torch.Size(piece.lo), len(whole.chunks))
        whole.chunks.append(ChunkStorageMetadata(torch.Size(piece.lo), torch.Size(piece.extent)))
        results.append(WriteResult(index, piece.length, _StorageInfo(piece.file, piece.offset, piece.length)))
    FileSystemWriter(folder).finish(metadata, [results])


class StoredTensors:
    """The tensors of a distributed checkpoint. Each is read on request and compared with its CRC-32.

    Raises ValueError when `folder` is not a checkpoint, cannot be read, or a tensor is corrupt.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.metadata: Metadata = read_metadata(folder)
        except Exception as error:  # unpickling can raise any exception
            raise ValueError(f"{folder} is not a Megatron checkpoint, or its .metadata is corrupt: {error!r}") from None
        self._files: dict[str, mmap.mmap] = {}  # mapped files by name
        self._chunks: dict[tuple[str, int], dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        self._compared: set[tuple[str, int]] = set()  # (file, offset) of checked pieces

    def check_files(self) -> None:
        """Raises ValueError unless every piece's whole archive lies in its file. The values are not read."""
        for index, info in self.metadata.storage_data.items():
            file = self._whole(index.fqn, info)
            last = info.offset + info.length - _END
            if (file[info.offset : info.offset + 4], file[last : last + 4]) != _MARKS:
                raise ValueError(self._corrupt(index.fqn, info))

    @property
    def has_tower(self) -> bool:
        """Whether the model's vision tower was trained: checkpoints hold no frozen one."""
        return self.has_part(TOWER)

    def has_part(self, name: str) -> bool:
        """Whether keys begin with `name` and a dot."""
        return any(key.startswith(f"{name}.") for key in self.metadata.state_dict_metadata)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensor(key).properties.dtype

    def _tensor(self, key: str) -> TensorStorageMetadata:
        stored = self.metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"{self.folder} does not fit this model: it lacks {key}")
        return stored

    def check(self, tensor: ShardedTensor, rows: int = 0) -> None:
        """Raises ValueError unless the checkpoint holds a tensor with this key and shape. A padded tensor (embeddings)
        needs at least `rows` rows."""
        stored, wanted = tuple(self._tensor(tensor.key).size), tuple(tensor.global_shape)
        fits = stored[1:] == wanted[1:] and stored[0] >= rows if tensor.allow_shape_mismatch else stored == wanted
        if not fits:
            shapes = f"{tensor.key} has shape {stored}; config.json implies {wanted}"
            raise ValueError(f"{self.folder} does not fit this model: {shapes}")

    def mapped(self, tensor: ShardedTensor) -> Tensor | None:
        """Return a read-only view [local_shape] of the file in its dtype if one piece is the tensor, else None."""
        for chunk in self._chunks_at(tensor):
            if _box(chunk) == _box_of(tensor):
                return self._piece(tensor.key, chunk).view(tensor.local_shape)
        return None

    def read_into(self, tensor: ShardedTensor) -> None:
        """Fill `tensor.data` [local_shape] from all pieces that overlap it, cast to its dtype.

        Raises ValueError when the pieces do not cover it, unless the tensor is padded.
        """
        wanted, count = _box_of(tensor), 0
        target = tensor.data.view((1,) * tensor.prepend_axis_num + tuple(tensor.local_shape))
        for chunk in self._chunks_at(tensor):
            if common := intersect(wanted, _box(chunk)):
                part = self._piece(tensor.key, chunk)[_relative(common, _box(chunk))]
                target[_relative(common, wanted)].copy_(part)
                count += size(common)
        if count != size(wanted) and not tensor.allow_shape_mismatch:
            held = f"{count} of {size(wanted)} elements of a part of {tensor.key}"
            raise ValueError(f"{self.folder} is damaged: it holds {held}")

    def _chunks_at(self, tensor: ShardedTensor) -> list[ChunkStorageMetadata]:
        """Return the pieces that may overlap `tensor`, those at its layer and expert, out of thousands."""
        axes = tensor.prepend_axis_num
        groups = self._chunks.get((tensor.key, axes))
        if groups is None:
            groups = self._chunks[tensor.key, axes] = {}
            for chunk in self._tensor(tensor.key).chunks:
                first, extent = chunk.offsets[:axes], chunk.sizes[:axes]
                for at in product(*(range(lo, lo + n) for lo, n in zip(first, extent, strict=True))):
                    groups.setdefault(at, []).append(chunk)
        return groups.get(tuple(tensor.global_offset[:axes]), [])

    def keys(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        stored = self.metadata.state_dict_metadata.items()
        return sorted(key for key, value in stored if isinstance(value, TensorStorageMetadata))

    def whole(self, key: str) -> Tensor:
        """Return a tensor with all its pieces, in its shape and dtype."""
        stored = self._tensor(key)
        if len(stored.chunks) == 1:
            return self._piece(key, stored.chunks[0])
        whole = torch.zeros(stored.size, dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            whole[_relative(_box(chunk), ((0,) * whole.dim(), tuple(stored.size)))] = self._piece(key, chunk)
        return whole

    def object_bytes(self, key: str) -> bytes:
        """Return the bytes of the object `key`, as stored. Raises KeyError when there is none."""
        name = f"{key}/shard_0_1"  # as Megatron names an object that is not sharded
        info = self.metadata.storage_data[MetadataIndex(name)]
        return self._whole(name, info)[info.offset : info.offset + info.length]

    def _piece(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        info = self.metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        buffer, path = self._whole(key, info), self.folder / info.relative_path
        try:
            with open(path, "rb") as file:
                self._compare(_Window(file.fileno(), info.offset, info.length), info)
                with FakeTensorMode():  # torch.load then reads no data and returns its offset
                    view = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
                    fake = read_object(view, f"{path} ({key})")
        except NotPlainData:
            raise
        except Exception as error:
            raise ValueError(self._corrupt(key, info, f" ({error})")) from None
        assert fake.shape == chunk.sizes and fake.is_contiguous() and fake.storage_offset() == 0, (
            f"{key}: {fake.shape} {fake.stride()}"
        )
        start = info.offset + fake.untyped_storage()._checkpoint_offset
        return mapped_tensor(buffer, start, fake.dtype, tuple(fake.shape))

    def _compare(self, archive: _Window, info: _StorageInfo) -> None:
        """Raises ValueError unless each record of a torch.save archive matches its CRC-32, which torch.load ignores.

        This reads the bytes from the disk; their later use reads them from the page cache.
        """
        if (info.relative_path, info.offset) in self._compared:
            return
        with zipfile.ZipFile(cast(IO[bytes], archive)) as records:
            if (bad := records.testzip()) is not None:
                raise ValueError(f"{bad.partition('/')[2]} has a wrong CRC-32")
        self._compared.add((info.relative_path, info.offset))

    def _whole(self, key: str, info: _StorageInfo) -> mmap.mmap:
        """Return the mapped file of a piece. Raises ValueError when the file ends before the piece does."""
        buffer, end = self._map(info.relative_path), info.offset + info.length
        if len(buffer) < end:
            why = f"{key} ends at byte {end} of {len(buffer)}"
            raise ValueError(f"{self.folder / info.relative_path} is truncated: {why}; copy the checkpoint again")
        return buffer

    def _corrupt(self, key: str, info: _StorageInfo, why: str = "") -> str:
        path = self.folder / info.relative_path
        return f"{path} is corrupt at byte {info.offset}, in {key}{why}; copy the checkpoint again"

    def _map(self, name: str) -> mmap.mmap:
        if name in self._files:
            return self._files[name]
        path = self.folder / name
        if not path.is_file() or not path.stat().st_size:
            why = f"it lacks {name}, which .metadata names"
            raise ValueError(f"{self.folder} is damaged: {why}; copy the checkpoint again")
        with open(path, "rb") as file:
            self._files[name] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return self._files[name]


class _Window(io.RawIOBase):
    """A part of a file as a file object. torch's own view seeks to the wrong side of its end."""

    def __init__(self, descriptor: int, offset: int, length: int):
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        self._at = to + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        count = max(0, min(len(view), self._length - self._at))
        count = os.preadv(self._descriptor, [view[:count]], self._offset + self._at)
        self._at += count
        return count


def _box(chunk: ChunkStorageMetadata) -> Box:
    return tuple(chunk.offsets), tuple(a + b for a, b in zip(chunk.offsets, chunk.sizes, strict=True))


def _box_of(tensor: ShardedTensor) -> Box:
    extent = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
    return tuple(tensor.global_offset), tuple(a + b for a, b in zip(tensor.global_offset, extent, strict=True))


def _relative(box: Box, to: Box) -> tuple[slice, ...]:
    """Return the slices that cut `box` out of a tensor that holds the box `to`."""
    return tuple(slice(lo - origin, hi - origin) for lo, hi, origin in zip(*box, to[0], strict=True))
