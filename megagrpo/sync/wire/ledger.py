"""Progress of each trainer rank that writes its blocks, for workers that read the blocks while the rank writes.

A rank keeps one ledger per slot: a file of 64-bit words beside the blocks. The words hold the version, the number of
bytes written, and a checksum per block. The rank holds a lock on the file; the kernel releases the lock when the rank
dies.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megagrpo.sync.wire.manifest import ALIGNMENT, Manifest, WeightSyncError

NUM_SLOTS = 2
HEADER = 1  # words before the checksums: one, with version and bytes written
VERSION_SHIFT = 40  # the lower bits count bytes written, in units of ALIGNMENT: up to 64 TiB
SHORTEST_PAUSE, LONGEST_PAUSE = 50e-6, 1e-3  # seconds between two polls of a rank's progress
LIVENESS_SECONDS = 0.1  # seconds between two checks that a late rank is alive
_FENCE = threading.Lock()


def ledger_path(folder: Path, rank: int, version: int) -> Path:
    """Return the path of rank `rank`'s ledger for the slot of `version`."""
    return folder / f"rank{rank}.ledger{version % NUM_SLOTS}"


def fence() -> None:
    """Memory fence: other processes see this thread's earlier reads and writes before its later ones.

    Acquiring a lock holds back later operations, and releasing it holds back earlier ones. No processor moves an
    acquire before a release that precedes it. So no operation crosses the release and acquire in the middle. x86 keeps
    the order of stores and of loads anyway; ARM does not.
    """
    for _ in range(2):
        with _FENCE:
            pass


class Ledger:
    """The ledger of one slot, on the writing side. `words` [HEADER + blocks] uint64 maps the file at `path`; `close`
    releases the lock.

    Version and bytes written share one word, stored atomically: a reader cannot mistake an older version's progress for
    this one's. Raises BlockingIOError when another process holds the lock.
    """

    def __init__(self, path: Path, words: np.ndarray):
        self.words = words
        self._file = path.open("rb")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def begin(self, version: int) -> None:
        """Start `version` with nothing written."""
        self._set_progress(version << VERSION_SHIFT)

    def note(self, version: int, number: int, checksum: int, end: int) -> None:
        """Record that block `number`, and everything before byte `end`, is written. `end` is rounded up to
        ALIGNMENT."""
        self.words[HEADER + number] = checksum
        self._set_progress(version << VERSION_SHIFT | -(-end // ALIGNMENT))

    def withdraw(self) -> None:
        """Give up the version in progress: readers that wait for it get an error."""
        self._set_progress(0)

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()

    def _set_progress(self, word: int) -> None:
        fence()  # blocks and checksums become visible before the progress
        self.words[0] = word


class Ledgers:
    """The ledgers of all ranks in `folder`, on the reading side, for one version.

    A rank that has not finished within `seconds` of construction is an error (None: no limit). `note` receives a
    description of each wait.
    """

    def __init__(
        self,
        folder: Path,
        version: int,
        seconds: float | None = None,
        note: Callable[[str], None] = lambda activity: None,
    ):
        self.folder, self.version, self.note = folder, version, note
        self.seconds, self.ends = seconds, math.inf if seconds is None else time.monotonic() + seconds
        self._open: dict[int, tuple[BinaryIO, np.ndarray]] = {}  # rank -> file, words
        self._written_before: dict[int, int] = {}  # rank -> lower bound of the bytes written

    def wait_for(self, rank: int, end: int, name: str) -> None:
        """Wait until `rank` has written all its blocks before byte `end`, including the tensor `name`.

        Raises WeightSyncError when the rank is late, has died, or has given up this version.
        """
        if self._written_before.get(rank, 0) >= end:
            return
        pause, checked = SHORTEST_PAUSE, time.monotonic()
        while (written := self._written(rank, name)) < end:
            if (now := time.monotonic()) > self.ends:
                raise WeightSyncError(f"rank {rank} has not written {name} within {self.seconds:g} s")
            if pause == SHORTEST_PAUSE:
                self.note(f"the load of {name}, which rank {rank} has not written")
            if now - checked > LIVENESS_SECONDS:
                if not self._lives(rank) and self._written(rank, name) < end:
                    raise WeightSyncError(f"rank {rank} died and has not written {name}")
                checked = now
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        fence()  # read the blocks only after the progress that covers them
        self._written_before[rank] = written

    def checksums(self, manifest: Manifest) -> dict[tuple[str, int], int]:
        """Return (tensor, index of a block of the tensor) -> the checksum of the written block. Call it when all ranks
        have finished."""
        fence()
        return {
            (name, index): int(self._ledger_of(block.rank)[1][HEADER + block.number])
            for name, tensor in manifest.tensors.items()
            for index, block in enumerate(tensor.blocks)
        }

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1][0].close()

    def _written(self, rank: int, name: str) -> int:
        word = int(self._ledger_of(rank)[1][0])
        if word >> VERSION_SHIFT != self.version:
            raise WeightSyncError(f"rank {rank} aborted weight version {self.version}, which contains {name}")
        return (word & (1 << VERSION_SHIFT) - 1) * ALIGNMENT

    def _lives(self, rank: int) -> bool:
        file = self._ledger_of(rank)[0]
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
        return False

    def _ledger_of(self, rank: int) -> tuple[BinaryIO, np.ndarray]:
        if rank not in self._open:
            path = ledger_path(self.folder, rank, self.version)
            try:
                file = path.open("rb")
            except OSError as error:
                raise WeightSyncError(f"rank {rank}: {path} cannot be read: {error.strerror}") from error
            self._open[rank] = file, np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint64)
        return self._open[rank]
