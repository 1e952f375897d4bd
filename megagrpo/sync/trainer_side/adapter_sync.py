"""Weight sync of LoRA adapters only: the model's weights stay in the engine.

The adapters are a PEFT folder in shared memory, which every server loads under a new name per version. Servers on other
hosts get its files over HTTP. Requests use that name, so no request is served with another version. Every worker
compares the checksums of its adapter with those of the written one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from megagrpo.config import LoraSection
from megagrpo.engine.client import VllmEngine
from megagrpo.platform.parallel.agree import run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.cleanup.ownership import SHARED_MEMORY, OwnFolder
from megagrpo.platform.process.cleanup.removal import remove
from megagrpo.platform.process.progress_hook import SILENT_TASK, Task
from megagrpo.platform.rendezvous.store_exchange import is_here
from megagrpo.sync.trainer_side.sync import SyncReport, Weights, WeightSync, error_text
from megagrpo.sync.trainer_side.transport import NO_HANDOVER, Handover, outcome_of_first_rank
from megagrpo.sync.wire.copy_checksums import checksum
from megagrpo.types import WeightSyncError
from megagrpo.weights.bridge.adapter_files import save_adapter
from megagrpo.weights.bridge.hf_export import Parameters, Source, find_sources
from megagrpo.weights.slices.tensor_index import ENGINE_DTYPES

Sums = dict[str, list[str]]  # projection (layers.0.self_attn.q_proj) -> [checksum of A, checksum of B * scale]


@dataclass
class BaseSync:
    """The sync of the weights below the adapters, which vLLM's own files do not have. They are sent once."""

    weight_sync: WeightSync
    weights: Callable[[], Weights]
    is_sent: bool = False

    def push(self, weight_version: int, handover: Handover, task: Task) -> bool:
        """Send the weights unless all servers have them. Returns whether it did. Collective."""
        if not self.weight_sync.ranks.all_reduce(torch.tensor(int(not self.is_sent)), "max"):
            return False
        self.weight_sync.push(self.weights(), weight_version, handover, task)
        self.is_sent = True
        return True

    def load_last(self, url: str) -> int | None:
        """Load the weights into the server at `url`, as `WeightSync.load_last`. None: the next push sends them."""
        version = self.weight_sync.load_last(url)
        self.is_sent = version is not None
        return version


class AdapterSync(WeightSync):
    """A `WeightSync` whose `push` takes blocks from `parameter_blocks.adapter_blocks`. `base` is the model
    as the config names it. Servers that are not `here` cannot read this host's `parent`. Construction is
    collective. Raises OSError when no folder can be created there, RankError on the other ranks.
    """

    def __init__(  # not that of WeightSync: there is no transport
        self,
        engine: VllmEngine | None,
        layout: Layout,
        dtype: str,
        lora: LoraSection,
        base: str,
        here: Callable[[str], bool] = is_here,
        parent: Path = SHARED_MEMORY,
        base_sync: BaseSync | None = None,
    ):
        self.engine, self.ranks, self.dtype, self._driving = engine, layout, dtype, threading.Lock()
        self.layout, self.lora, self.base, self.here = layout, lora, base, here
        self.base_sync = base_sync
        self._own: OwnFolder | None = None

        def create() -> None:
            self._own = OwnFolder(parent) if engine is not None else None

        run_own_and_agree(layout, create)
        self.folder = parent if self._own is None else self._own.path  # rank 0 writes
        self._delivered_adapter: tuple[Path, Sums, int] | None = None
        self._sources: dict[str, Source] = {}  # since the first push

    @torch.no_grad()
    def push(
        self, parameters: Weights, weight_version: int, handover: Handover = NO_HANDOVER, task: Task = SILENT_TASK
    ) -> SyncReport:
        """Send the current adapters to the engine as `weight_version`. Collective.

        Raises WeightSyncError on every rank when any part fails; the engine keeps its previous adapter.
        """
        started = time.perf_counter()
        folder, first = self.folder / f"adapter{weight_version}", self.ranks.world_rank == 0
        sums: Sums = {}
        self._checksum_seconds = 0.0
        if first:
            remove(folder)  # left by a failed push
        handover.before_sending()
        try:
            blocks, dtype = cast(Parameters, list(parameters)), ENGINE_DTYPES[self.dtype]
            self._sources = self._sources or find_sources(blocks, self.layout)
            look = partial(self._note, sums)
            save_adapter(blocks, self.layout, self._sources, folder, self.lora, self.base, dtype, look)
        except (OSError, ValueError) as error:  # a disk error, or NaN or infinity in a weight
            raise WeightSyncError(f"weight version {weight_version} was not written: {error}") from error
        published = time.perf_counter()
        if self.base_sync is None or not self.base_sync.push(weight_version, handover, task):
            handover.before_serving()
        outcome = outcome_of_first_rank(
            self.ranks, self._deliver_adapter(folder, sums, weight_version) if first else (), 2
        )
        if isinstance(outcome, str):
            raise WeightSyncError(f"weight version {weight_version} did not reach the engine: {outcome}")
        ended = time.perf_counter()
        return SyncReport(
            weight_version,
            published - started,
            ended - published,
            ended - started,
            self._checksum_seconds,
            *map(int, outcome),
        )

    def load_last(self, url: str) -> int | None:
        """Load the last `push`'s adapter into the server at `url`; returns its version. See `WeightSync.load_last`."""
        assert self.engine is not None, "rank 0 drives the engine"
        with self._driving:
            if self._delivered_adapter is None:
                return self.engine.weight_version
            if self.base_sync is not None and self.base_sync.load_last(url) is None:
                return None
            folder, sums, version = self._delivered_adapter
            self.engine.load_adapter(folder, version, sums, self.here, only=[url])
            return version

    def close(self) -> None:
        """Remove the adapters in shared memory."""
        if self._own is not None:
            self._own.close()
        if self.base_sync is not None:
            self.base_sync.weight_sync.close()

    def _note(self, sums: Sums, name: str, values: Tensor) -> None:
        """Record the checksum of one tensor [...] in the form that vLLM holds: B is multiplied by the scale."""
        values = values * self.lora.scale if "lora_B" in name else values
        started = time.perf_counter()
        total = str(checksum(values))
        self._checksum_seconds += time.perf_counter() - started
        # A comes before B
        sums.setdefault(name[name.index("layers.") :].rpartition(".lora_")[0], []).append(total)

    def _deliver_adapter(self, folder: Path, sums: Sums, version: int) -> tuple[int, int] | str:
        """Load the adapter into the engine, on rank 0; return (bytes written, bytes read), or an error message.

        This method must not raise, because the other ranks wait for its result.
        """
        assert self.engine is not None, "rank 0 drives the engine"
        try:
            with self._driving:
                workers = self.engine.load_adapter(folder, version, sums, self.here)
                self.engine.use_adapter(version)
                self._delivered_adapter = folder, sums, version
            used = {f"adapter{kept}" for kept in range(self.engine.oldest_adapter(version), version + 1)}
            for path in self.folder.glob("adapter*"):
                if path.name not in used:
                    remove(path)
        except Exception as error:
            return error_text(error)
        size = sum(path.stat().st_size for path in folder.iterdir())
        return size, size * workers
