"""Weight sync through CUDA IPC, for servers that share the trainer's GPUs.

It works like the shared memory transport, but each rank packs its blocks into a buffer on its GPU, which the workers of
its node map. The buffer lives for one update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megagrpo.config.sections.transport_table import TRANSPORTS
from megagrpo.engine.client import VllmEngine
from megagrpo.sync.trainer_side.node_shares import Nodes
from megagrpo.sync.trainer_side.shared_buffers import Slots
from megagrpo.sync.trainer_side.shared_memory import FileUpdate, SharedMemory
from megagrpo.sync.trainer_side.transport import Ranks, Weight, of_first_rank, own_or_raise
from megagrpo.sync.wire.cuda_handles import export, mappable_bytes, release


class CudaIpc(SharedMemory):
    """The transport for servers that share the trainer's GPUs. `settings.device` is this rank's GPU. The index and the
    workers' reports still go through files."""

    receiver = TRANSPORTS["cuda_ipc"].receiver
    refills = False

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._servers: dict[str, int] | None = None  # url -> number of workers, of rank 0 in the last update

    @contextmanager
    def prepare(self, weights: Sequence[Weight], version: int, engine: VllmEngine | None) -> Iterator[HandleUpdate]:
        """Like `SharedMemory.prepare`; the update also has one handle of each rank's buffer per worker."""
        own = own_or_raise(self.untimed_ranks, lambda: dict(engine.workers()) if engine is not None else {})
        servers = self._servers = of_first_rank(self.untimed_ranks, own, self._servers)
        with super().prepare(weights, version, engine) as update:
            buffers = update.slots.buffers
            # torch never frees a handle that no process opens
            count = sum(num for url, num in servers.items() if self._node_of(url) == self.node)
            everyone = self.untimed_ranks.all_gather_objects(
                {name: [export(buffer) for _ in range(count)] for name, buffer in buffers.items()}
            )
            handles = dict[str, dict[str, list[dict[str, Any]]]]()
            for node in self.folders:
                of_ranks = [made for rank, made in enumerate(everyone) if self.nodes.of_ranks[rank] == node]
                unused = {name: iter(exported) for made in of_ranks for name, exported in made.items()}
                for url in (url for url in servers if self._node_of(url) == node):
                    handles[url] = {name: [next(left) for _ in range(servers[url])] for name, left in unused.items()}
            of_files: dict[str, Any] = vars(update) | {"servers": servers}
            on_gpus = HandleUpdate(**of_files, handles=handles, buffers=buffers)
            try:
                yield on_gpus
            finally:
                on_gpus.release()

    def _node_of(self, server: str) -> int:
        return self.nodes.servers.get(server, self.node) if self.nodes.many else self.node

    def _slots(self, weights: Sequence[Weight]) -> DeviceSlots:
        return DeviceSlots(weights, self.untimed_ranks, self.dtype, self.folder, self.nodes, self.settings.device)


class DeviceSlots(Slots):
    """This rank's blocks in one buffer on its GPU; both slots use the same buffer."""

    def __init__(
        self, weights: Sequence[Weight], ranks: Ranks, dtype: str, folder: Path, nodes: Nodes, device: torch.device
    ):
        super().__init__(weights, ranks, dtype, folder, nodes)
        self.device = device

    def memory_of(self, rank: int, slot: int, folder: Path) -> str:
        """Return the name in blocks of the buffer of `rank`."""
        return f"gpu of rank {rank}"

    def buffer(self, slot: int) -> tuple[str, Tensor]:
        """Return the buffer's name in blocks, and its bytes [size] uint8 on the GPU."""
        name = self.memory_of(self.rank, slot, self.folder)
        if name not in self.buffers:
            self.buffers[name] = mappable_bytes(self.size, self.device)
        return name, self.buffers[name]


@dataclass(kw_only=True)
class HandleUpdate(FileUpdate):
    """One update whose blocks are in GPU memory."""

    # server -> buffer -> one handle per worker
    handles: dict[str, dict[str, list[dict[str, Any]]]]
    buffers: dict[str, Tensor]

    def request(self, server: str) -> dict[str, Any]:
        """Return the request for the workers of `server`, with one handle per worker."""
        return super().request(server) | {"handles": self.handles[server]}

    def release(self) -> None:
        """Free the buffer. torch keeps memory while a handle counts, so count down the handles of workers that did not
        report: they did not map it, or ended with it."""
        for server, of_server in self.handles.items():
            for name in self.buffers.keys() & of_server.keys():
                reported = {report["worker"] for report in self.reports(server) or () if "activity" not in report}
                for worker, handle in enumerate(of_server[name]):
                    if worker not in reported:
                        release(handle)
        self.buffers.clear()
        torch.cuda.ipc_collect()
