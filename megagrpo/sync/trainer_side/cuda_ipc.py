"""Weight sync through CUDA IPC, for servers that share the trainer's GPUs.

It works like the shared memory transport, but each rank packs its blocks into a buffer on its GPU, which the workers of
its node map. The buffer lives for one update.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megagrpo.engine.client import VllmEngine
from megagrpo.sync.trainer_side.node_shares import Nodes
from megagrpo.sync.trainer_side.shared_memory import SHARED_MEMORY, FileUpdate, SharedMemory, replies_of
from megagrpo.sync.trainer_side.slots import Slots
from megagrpo.sync.trainer_side.transport import Ranks, Weight
from megagrpo.sync.wire.cuda_handles import export, release
from megagrpo.sync.wire.manifest import WeightSyncError


class CudaIpc(SharedMemory):
    """The transport for servers that share the trainer's GPUs. `device` is this rank's GPU. The manifest and the
    workers' reports still go through files."""

    def __init__(
        self,
        ranks: Ranks,
        dtype: str,
        device: torch.device,
        folder: Path = SHARED_MEMORY,
        seconds: float | None = None,
        nodes: Nodes | None = None,
    ):
        if name := expandable_segments(os.environ):
            raise ValueError(
                f"{name}: expandable_segments:True and rollout.weight_sync_transport cuda_ipc exclude each other, "
                f"because most containers "
                "do not permit to map such memory; unset the variable, or set the transport to shared_memory"
            )
        super().__init__(ranks, dtype, folder, seconds, nodes)
        self.device = device

    def prepare(self, parameters: Sequence[Weight], version: int, engine: VllmEngine | None) -> HandleUpdate:
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
        # torch never frees a handle that no process opens
        mine = sum(count for url, count in servers.items() if self._node_of(url) == self.node)
        exports = {name: [export(buffer) for _ in range(mine)] for name, buffer in buffers.items()}
        handles = dict[str, dict[str, list[dict[str, Any]]]]()
        everyone = self.ranks.all_gather_objects(exports)
        for node in self.folders:
            of_node = {url: count for url, count in servers.items() if self._node_of(url) == node}
            of_ranks = [made for rank, made in enumerate(everyone) if self.nodes.of_ranks[rank] == node]
            exported = {name: of_buffer for made in of_ranks for name, of_buffer in made.items()}
            for index, url in enumerate(of_node):
                first = sum(list(of_node.values())[:index])
                handles[url] = {name: of_buffer[first : first + of_node[url]] for name, of_buffer in exported.items()}
        files = (update.manifest, update.folder, update.seconds, update.slots, update.to_write, servers)
        return HandleUpdate(
            *files, elsewhere=update.elsewhere, crossings=update.crossings, handles=handles, buffers=buffers
        )

    def _node_of(self, server: str) -> int:
        return self.nodes.servers.get(server, self.node) if self.nodes.many else self.node

    def _slots(self, parameters: Sequence[Weight]) -> DeviceSlots:
        return DeviceSlots(parameters, self.ranks, self.dtype, self.folder, self.nodes, self.device)


def expandable_segments(environment: Mapping[str, str]) -> str | None:
    """Return the variable that makes torch's allocator use expandable segments, or None. torch and vLLM read the first
    one that is set."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if text := environment.get(name, ""):
            return name if "expandable_segments:true" in text.lower().replace(" ", "") else None
    return None


class DeviceSlots(Slots):
    """This rank's blocks in one buffer on its GPU; both slots use the same buffer."""

    def __init__(
        self, parameters: Sequence[Weight], ranks: Ranks, dtype: str, folder: Path, nodes: Nodes, device: torch.device
    ):
        super().__init__(parameters, ranks, dtype, folder, nodes)
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

    # server -> buffer -> one handle per worker
    handles: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def request(self, server: str) -> dict[str, Any]:
        """Return the request for the workers of `server`, with one handle per worker."""
        return super().request(server) | {"handles": self.handles[server]}

    def done(self) -> None:
        """Free the buffer. torch keeps memory while a handle counts, so count down the handles of workers that did not
        report."""
        super().done()
        for name in self.buffers:
            for handle in self._unused(name):
                release(handle)
        self.buffers.clear()
        torch.cuda.ipc_collect()

    def _unused(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the handles of a buffer whose workers have not reported: they did not map it, or ended with it."""
        for server, buffers in self.handles.items():
            for worker, handle in enumerate(buffers.get(name, ())):
                if not (replies_of(self.folder, server) / f"worker{worker}.json").exists():
                    yield handle
