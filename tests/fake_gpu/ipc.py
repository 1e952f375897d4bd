"""GPU memory that processes share by CUDA IPC, on fake GPUs.

torch's part is real: the fields of a handle, the reference counters (files in shared memory), the storages that torch
keeps while a counter is above 0, and `ipc_collect`. So is this project's part: export, request, packing, progress file,
checksums and release.

CUDA's part is a stand-in. The runtime's `cudaIpcGetMemHandle` and `cudaIpcOpenMemHandle` do nothing, and its memory
belongs to one process. Here a handle names a file in memory, which the other process maps. The exporting process writes
its storage to that file whenever its host waits for the device, as late as CUDA permits. A reader that reads before
this wait sees garbage. Writes of a reader do not reach the exporting process. Events are left out, because this
project's handles ask for none.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from tests.fake_gpu.kernels import Kernels

HANDLE_BYTES = 64  # of CUDA's handle; torch adds one byte for its kind before it
GARBAGE = b"\xff"


@dataclass
class Exported:
    """A storage of this process and the file that shows it to other processes."""

    storage: StorageWeakRef
    address: int
    descriptor: int
    memory: mmap.mmap

    def publish(self) -> None:
        """Write the storage's bytes to the file."""
        self.memory[:] = ctypes.string_at(self.address, len(self.memory))


@dataclass
class Sharing:
    """The storages that this process has exported. The file of a storage remains open until the process ends."""

    exported: dict[int, Exported] = field(default_factory=dict)  # by address

    def share(self, storage: UntypedStorage, *args: Any) -> tuple:
        """Return what torch returns for a storage that it exports, with the name of a file in place of CUDA's
        handle."""
        device, handle, *rest = _share(storage, *args)
        entry = self.exported.get(storage.data_ptr())
        if entry is None or entry.storage.expired() or len(entry.memory) != storage.nbytes():
            descriptor = os.memfd_create("fake gpu")
            os.write(descriptor, GARBAGE * storage.nbytes())
            memory = mmap.mmap(descriptor, storage.nbytes())
            entry = Exported(StorageWeakRef(storage), storage.data_ptr(), descriptor, memory)
            self.exported[storage.data_ptr()] = entry
        name = f"{os.getpid()}/fd/{entry.descriptor}".encode()
        return device, handle[:1] + name.ljust(HANDLE_BYTES, b"\0"), *rest

    def publish(self) -> None:
        """Show other processes what this process has written: its host has waited for the device."""
        self.exported = {address: entry for address, entry in self.exported.items() if not entry.storage.expired()}
        for entry in self.exported.values():
            entry.publish()


_share = UntypedStorage._share_cuda_


def map_shared(
    device: int, handle: bytes, count: int, offset: int, counter: bytes, place: int, *event: Any
) -> UntypedStorage:
    """Return a storage of `count` bytes over the file that a handle names. Its end counts down the handle's reference,
    as torch does."""
    try:
        with open(f"/proc/{handle[1:].rstrip(bytes(1)).decode()}", "r+b") as file:
            memory = mmap.mmap(file.fileno(), count)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"CUDA error: invalid resource handle ({error})") from None
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    storage = torch._C._construct_storage_from_data_pointer(address, torch.device("cuda", device), count)

    def close() -> None:
        UntypedStorage._release_ipc_counter_cuda(counter, place)
        del mapped[address]

    mapped[address] = memory
    weakref.finalize(storage, close)
    return storage


mapped: dict[int, mmap.mmap] = {}  # what this process has mapped, by address


def share_between_processes() -> None:
    """Make this process, which computes by `Kernels`, export and map memory as above."""
    assert Kernels.active is not None
    sharing, synchronize = Sharing(), torch.cuda.synchronize

    def wait_and_publish(*args: Any) -> None:
        synchronize(*args)
        sharing.publish()

    UntypedStorage._share_cuda_ = lambda storage, *args: sharing.share(storage, *args)
    UntypedStorage._new_shared_cuda = classmethod(lambda cls, *args: map_shared(*args))
    torch.cuda.synchronize, Kernels.active.on_wait = wait_and_publish, sharing.publish
