"""Weights from GPU memory that the workers map, for servers that share the trainer's GPUs.

As through shared memory, with the blocks packed into a buffer on each rank's GPU instead of a file. The buffer lives for one update.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megagrpo.engine.protocol import Engine
from megagrpo.transfer.cuda_handles import export
from megagrpo.transfer.manifest import WeightSyncError
from megagrpo.weight_sync.shared_memory import SHARED_MEMORY, FileUpdate, SharedMemory, Slots
from megagrpo.weight_sync.transport import Ranks, Weights


class CudaIpc(SharedMemory):
    """The transport of a run whose servers share the trainer's GPUs. `device` is this rank's. The manifest and the workers' reports still
    go through files."""

    def __init__(self, ranks: Ranks, dtype: str, device: torch.device, folder: Path = SHARED_MEMORY, seconds: float | None = None):
        super().__init__(ranks, dtype, folder, seconds)
        self.device = device

    def prepare(self, found: Weights, version: int, engine: Engine | None) -> HandleUpdate:
        """As `SharedMemory.prepare`, with a handle of each rank's buffer for each worker."""
        servers: dict[str, int] | str | None = None
        try:
            servers = engine.workers() if engine is not None else None
        except Exception as error:
            servers = str(error)
        servers = self.ranks.all_gather_objects(servers)[0]
        if isinstance(servers, str):
            raise WeightSyncError(servers)
        update = super().prepare(found, version, engine)
        buffers = self._published.buffers
        told = self.ranks.all_gather_objects(
            {name: [export(buffer) for _ in range(sum(servers.values()))] for name, buffer in buffers.items()}
        )
        handles = {name: own for rank in told for name, own in rank.items()}
        made = update.manifest, update.folder, update.seconds, update.slots, update.given
        return HandleUpdate(*made, servers, handles=handles, buffers=buffers)

    def _slots(self, found: Weights) -> DeviceSlots:
        return DeviceSlots(found, self.ranks, self.dtype, self.folder, self.device)


class DeviceSlots(Slots):
    """This rank's blocks in one buffer on its GPU."""

    def __init__(self, found: Weights, ranks: Ranks, dtype: str, folder: Path, device: torch.device):
        super().__init__(found, ranks, dtype, folder)
        self.device = device

    def buffer(self, slot: int) -> tuple[str, Tensor]:
        """What blocks call the buffer, and its bytes."""
        name = f"gpu of rank {self.rank}"
        if name not in self.buffers:
            self.buffers[name] = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        return name, self.buffers[name]


@dataclass
class HandleUpdate(FileUpdate):
    """One update whose blocks lie on GPUs."""

    handles: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # buffer -> a handle for each worker of all servers
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def request(self, server: str) -> dict[str, Any]:
        """What the workers of `server` are told, with a handle for each of them."""
        first = sum(count for url, count in list(self.servers.items())[: list(self.servers).index(server)])
        own = {name: handles[first : first + self.servers[server]] for name, handles in self.handles.items()}
        return super().request(server) | {"handles": own}

    def done(self) -> None:
        """Give the buffer's memory back."""
        super().done()
        self.buffers.clear()
        torch.cuda.ipc_collect()
