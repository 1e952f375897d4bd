"""Tensors whose memory leaves the device for a while. They stay what they are, and so does every view of them: their storage is emptied in
place, and gets its bytes back in place. Reading one meanwhile is an error or garbage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

import megagrpo.device as device

PIECE_BYTES = 2**28  # pinned memory comes in powers of two


class HostMemory:
    """Memory of the host that the device copies from and to, in pieces; it grows, and is used again."""

    def __init__(self):
        self.pieces: list[Tensor] = []

    def part(self, start: int, size: int) -> Iterator[tuple[Tensor, slice]]:
        """The bytes from `start` on, a piece at a time: a view [n] of it, and which of the `size` bytes it is for."""
        done = 0
        while done < size:
            number, place = divmod(start + done, PIECE_BYTES)
            while number >= len(self.pieces):
                self.pieces.append(device.host_bytes(PIECE_BYTES))
            count = min(size - done, PIECE_BYTES - place)
            yield self.pieces[number][place : place + count], slice(done, done + count)
            done += count


class Away:
    """Storages that have left the device: `move` keeps their bytes in the host's memory, `drop` keeps nothing. `bring_back` undoes both;
    what was dropped is zero then."""

    def __init__(self):
        self._host = HostMemory()
        self._storages: dict[int, tuple[UntypedStorage, int, int | None]] = {}  # with their size, and where their bytes are
        self._copied: dict[int, tuple[UntypedStorage, int]] = {}  # where the host has the bytes of each; held, so a key stays its own
        self._version: int | None = None  # of these
        self.used = 0  # bytes in the host's memory

    @property
    def is_empty(self) -> bool:
        """Whether everything is on the device."""
        return not self._storages

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage has left."""
        return tensor.untyped_storage()._cdata in self._storages

    @torch.no_grad()
    def move(self, tensors: Iterable[Tensor], version: int | None = None) -> None:
        """Move what of these tensors' storages is on the device, each once. What the host has of the same `version` of their contents is
        not copied again; without one that is nothing."""
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
        """Free what of these tensors' storages is on the device."""
        for key, storage in self._still_there(tensors):
            self._storages[key] = storage, storage.nbytes(), None
            _empty(storage)

    @torch.no_grad()
    def bring_back(self) -> None:
        """Fill all storages again."""
        while self._storages:
            storage, size, start = next(reversed(self._storages.values()))
            if storage.nbytes() != size:
                storage.resize_(size)
            if start is None:
                _bytes(storage).zero_()
            else:
                for host, part in self._host.part(start, size):
                    _bytes(storage)[part].copy_(host, non_blocking=True)
            self._storages.popitem()
        if self._version is None:
            self._forget()

    def _forget(self) -> None:
        assert self.is_empty, "what the host has is all that there is"
        self._copied.clear()
        self.used = 0

    def _copy(self, storage: UntypedStorage) -> int:
        """Where the host has its bytes now."""
        size, start = storage.nbytes(), self.used
        for host, part in self._host.part(start, size):
            host.copy_(_bytes(storage)[part], non_blocking=True)
        self.used += size
        return start

    def _still_there(self, tensors: Iterable[Tensor]) -> list[tuple[int, UntypedStorage]]:
        return [(key, storage) for key, storage in storages(tensors).items() if key not in self._storages]


def storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """The storages of these tensors that are on the device and hold something, each once, by what tells it from others."""
    kind, found = device.device().type, {}
    for tensor in tensors:
        if tensor.device.type == kind and (storage := tensor.untyped_storage()).nbytes():
            found[storage._cdata] = storage
    return found


def _empty(storage: UntypedStorage) -> None:
    """Give a storage's memory back, in the order of the device's work: what a copy still reads is given to nobody before it is over."""
    if storage.resizable():
        storage.resize_(0)
    else:  # NumPy has looked into it, on a CPU: there is no memory to win, but who reads it now is to notice
        _bytes(storage).fill_(255)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
