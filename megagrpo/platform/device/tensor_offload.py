"""Offloads tensors from the device for a while. The tensors and their views remain valid objects: their storage is
emptied in place and refilled in place. Reading an offloaded tensor is an error or returns garbage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

import megagrpo.platform.device as device

PIECE_BYTES = 2**28  # pinned memory is allocated in powers of two


class OffloadedStorages:
    """Storages that are off the device: `move` keeps their bytes in host memory, `drop` keeps nothing. `bring_back`
    restores both;
    dropped storages are then zero."""

    def __init__(self) -> None:
        self._host: list[Tensor] = []  # pieces of host memory, which are reused
        # offloaded: (storage, size, host offset; None if dropped)
        self._storages: dict[int, tuple[UntypedStorage, int, int | None]] = {}
        # (storage, host offset); the reference keeps the key unique
        self._copied: dict[int, tuple[UntypedStorage, int]] = {}
        self._version: int | None = None  # version of the copied contents
        self.used = 0  # bytes used of host memory

    @property
    def is_empty(self) -> bool:
        """Whether everything is on the device."""
        return not self._storages

    def has(self, tensor: Tensor) -> bool:
        """Whether the storage of a tensor of any shape is offloaded."""
        return tensor.untyped_storage()._cdata in self._storages

    @torch.no_grad()
    def move(self, tensors: Iterable[Tensor], version: int | None = None) -> None:
        """Offload the storages of these tensors, of any shapes, that are on the device, each once.

        A storage that the host holds in the same `version` is not copied again. With `version` None all are copied.
        """
        if version != self._version:
            self._forget()
            self._version = version
        for key, storage in self._still_there(tensors):
            if key not in self._copied:
                self._copied[key] = storage, self._copy(storage)
            self._storages[key] = storage, storage.nbytes(), self._copied[key][1]
            _empty(storage)

    @torch.no_grad()
    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Free the storages of these tensors, of any shapes, that are on the device, without a copy."""
        for key, storage in self._still_there(tensors):
            self._storages[key] = storage, storage.nbytes(), None
            _empty(storage)

    @torch.no_grad()
    def bring_back(self) -> None:
        """Restore all storages on the device."""
        while self._storages:
            storage, size, start = next(reversed(self._storages.values()))
            if storage.nbytes() != size:
                storage.resize_(size)
            if start is None:
                _bytes(storage).zero_()
            else:
                for host, part in self._host_parts(start, size):
                    _bytes(storage)[part].copy_(host, non_blocking=True)
            self._storages.popitem()
        if self._version is None:
            self._forget()

    def _forget(self) -> None:
        assert self.is_empty, "what the host has is all that there is"
        self._copied.clear()
        self.used = 0

    def _copy(self, storage: UntypedStorage) -> int:
        """Copy a storage to host memory and return its host offset."""
        size, start = storage.nbytes(), self.used
        for host, part in self._host_parts(start, size):
            host.copy_(_bytes(storage)[part], non_blocking=True)
        self.used += size
        return start

    def _host_parts(self, start: int, size: int) -> Iterator[tuple[Tensor, slice]]:
        """Yield `size` bytes of host memory from `start`, piece by piece: a view [n] uint8 of the piece, and the slice
        of the `size` bytes that it holds. Host memory grows as needed."""
        done = 0
        while done < size:
            index, offset = divmod(start + done, PIECE_BYTES)
            while index >= len(self._host):
                self._host.append(device.host_bytes(PIECE_BYTES))
            count = min(size - done, PIECE_BYTES - offset)
            yield self._host[index][offset : offset + count], slice(done, done + count)
            done += count

    def _still_there(self, tensors: Iterable[Tensor]) -> list[tuple[int, UntypedStorage]]:
        return [(key, storage) for key, storage in storages(tensors).items() if key not in self._storages]


def storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Return the non-empty storages of these tensors, of any shapes, on the device, each once, by their address."""
    kind = device.device().type
    on_device: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type == kind and (storage := tensor.untyped_storage()).nbytes():
            on_device[storage._cdata] = storage
    return on_device


def _empty(storage: UntypedStorage) -> None:
    """Free a storage's memory in device order: the allocator reuses it only after pending copies have read it."""
    if storage.resizable():
        storage.resize_(0)
    else:  # on a CPU, when NumPy shares it: no memory can be freed, so garbage makes reads visible
        _bytes(storage).fill_(255)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
