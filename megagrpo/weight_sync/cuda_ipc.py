"""Weight sync through CUDA IPC, for servers that share the trainer's GPUs.

It works like the shared memory transport, but each rank packs its blocks into a buffer on its GPU, which the workers map. The buffer lives
for one update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megagrpo.engine.protocol import Engine
from megagrpo.transfer.cuda_handles import export
from megagrpo.transfer.manifest import WeightSyncError
from megagrpo.weight_sync.shared_memory import SHARED_MEMORY, FileUpdate, SharedMemory, Slots
from megagrpo.weight_sync.transport import Ranks, Weight


class CudaIpc(SharedMemory):
    """The transport for servers that share the trainer's GPUs. `device` is this rank's GPU. The manifest and the workers' reports still go
    through files."""

    def __init__(self, ranks: Ranks, dtype: str, device: torch.device, folder: Path = SHARED_MEMORY, seconds: float | None = None):
        super().__init__(ranks, dtype, folder, seconds)
        self.device = device

    def prepare(self, parameters: Sequence[Weight], version: int, engine: Engine | None) -> HandleUpdate:
        """Like `SharedMemory.prepare`; the update also has one handle of each rank's buffer per worker."""
        servers: dict[str, int] | str | None = None
        try:
            servers = engine.workers() if engine is not None else None
        except Exception as error:
            servers = str(error)
        servers = self.ranks.all_gather_objects(servers)[0]
        if isinstance(servers, str):
            raise WeightSyncError(servers)
        assert servers is not None, "rank 0 has the engine"
        update = super().prepare(parameters, version, engine)
        buffers = update.slots.buffers
        exports = {name: [export(buffer) for _ in range(sum(servers.values()))] for name, buffer in buffers.items()}
        handles = {name: exported for of_rank in self.ranks.all_gather_objects(exports) for name, exported in of_rank.items()}
        return HandleUpdate(
            update.manifest, update.folder, update.seconds, update.slots, update.to_write, servers, handles=handles, buffers=buffers
        )

    def _slots(self, parameters: Sequence[Weight]) -> DeviceSlots:
        return DeviceSlots(parameters, self.ranks, self.dtype, self.folder, self.device)


class DeviceSlots(Slots):
    """This rank's blocks in one buffer on its GPU; both slots use the same buffer."""

    def __init__(self, parameters: Sequence[Weight], ranks: Ranks, dtype: str, folder: Path, device: torch.device):
        super().__init__(parameters, ranks, dtype, folder)
        self.device = device

    def buffer(self, slot: int) -> tuple[str, Tensor]:
        """Return the buffer's name in blocks, and its bytes [size] uint8 on the GPU."""
        name = f"gpu of rank {self.rank}"
        if name not in self.buffers:
            self.buffers[name] = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        return name, self.buffers[name]


@dataclass
class HandleUpdate(FileUpdate):
    """One update whose blocks are in GPU memory."""

    handles: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # buffer -> one handle per worker, over all servers
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def request(self, server: str) -> dict[str, Any]:
        """Return the request for the workers of `server`, with one handle per worker."""
        assert self.servers is not None, "`CudaIpc.prepare` sets the servers"
        first = sum(count for url, count in list(self.servers.items())[: list(self.servers).index(server)])
        of_server = {name: handles[first : first + self.servers[server]] for name, handles in self.handles.items()}
        return super().request(server) | {"handles": of_server}

    def done(self) -> None:
        """Free the buffer."""
        super().done()
        self.buffers.clear()
        torch.cuda.ipc_collect()
