"""How far each trainer rank has come with writing its blocks, for workers that read while it writes.

A rank keeps one ledger for each slot, a file of 64-bit words beside the blocks: how far it is, of which version, and a checksum of each
block. It holds a lock on the file, which the kernel takes from it when it dies.
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

from megagrpo.transfer.manifest import ALIGNMENT, Manifest, WeightSyncError

NUM_SLOTS = 2
HEADER = 1  # words before the checksums
VERSION_SHIFT = 40  # bits for the bytes that are written, in units of ALIGNMENT: 64 TB
SHORTEST_PAUSE, LONGEST_PAUSE = 50e-6, 1e-3  # seconds between two looks at how far a rank is
LOOK_SECONDS = 0.1  # between two looks at whether it lives
_FENCE = threading.Lock()


def ledger_path(folder: Path, rank: int, version: int) -> Path:
    """Where rank `rank` keeps the ledger of the slot that `version` is in."""
    return folder / f"rank{rank}.ledger{version % NUM_SLOTS}"


def fence() -> None:
    """Keep what this thread read and wrote before it ahead of what comes after it, as other processes see it.

    A lock's acquire holds back what follows, its release what went before, and no processor moves an acquire ahead of a release that it
    follows: so nothing crosses the release and acquire in the middle. x86 keeps the order of stores and of loads anyway; ARM does not.
    """
    for _ in range(2):
        with _FENCE:
            pass


class Ledger:
    """The writing side, of one slot. `words` are those of the file at `path`; `close` gives the lock up.

    Version and bytes share one word, which is stored at once: nobody takes how far an older version came for this one's.
    """

    def __init__(self, path: Path, words: np.ndarray):
        self.words = words
        self._file = path.open("rb")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def begin(self, version: int) -> None:
        """Nothing of `version` is written yet."""
        self._tell(version << VERSION_SHIFT)

    def note(self, version: int, number: int, checksum: int, end: int) -> None:
        """The block of this number is written, as everything up to byte `end`, which is rounded up to ALIGNMENT."""
        self.words[HEADER + number] = checksum
        self._tell(version << VERSION_SHIFT | -(-end // ALIGNMENT))

    def withdraw(self) -> None:
        """There will be no more of the version that is under way."""
        self._tell(0)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _tell(self, word: int) -> None:
        fence()  # the blocks and checksums first
        self.words[0] = word


class Ledgers:
    """The reading side: those of all ranks, in `folder`, for one version. A rank that is not done within `seconds` of now is an error;
    `note` hears of what is waited for."""

    def __init__(self, folder: Path, version: int, seconds: float | None = None, note: Callable[[str], None] = lambda place: None):
        self.folder, self.version, self.note = folder, version, note
        self.seconds, self.ends = seconds, math.inf if seconds is None else time.monotonic() + seconds
        self._open: dict[int, tuple[BinaryIO, np.ndarray]] = {}  # rank -> file, words
        self._seen: dict[int, int] = {}  # rank -> bytes that it has written, at least

    def wait_for(self, rank: int, end: int, name: str) -> None:
        """Return once `rank` has written all its blocks up to byte `end`, `name` among them. WeightSyncError when it does not any more,
        with the reason."""
        if self._seen.get(rank, 0) >= end:
            return
        pause, looked = SHORTEST_PAUSE, time.monotonic()
        while (written := self._written(rank, name)) < end:
            if (now := time.monotonic()) > self.ends:
                raise WeightSyncError(f"rank {rank} has not written {name} within {self.seconds:g} s")
            if pause == SHORTEST_PAUSE:
                self.note(f"the load of {name}, which rank {rank} has not written")
            if now - looked > LOOK_SECONDS:
                if not self._lives(rank) and self._written(rank, name) < end:
                    raise WeightSyncError(f"rank {rank} is gone and has not written {name}")
                looked = now
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        fence()  # what is written is read after that it is
        self._seen[rank] = written

    def checksums(self, manifest: Manifest) -> dict[tuple[str, int], int]:
        """(tensor, index of a block of it) -> the checksum of what was written. All ranks are done."""
        fence()
        return {
            (name, index): int(self._of(block.rank)[1][HEADER + block.number])
            for name, tensor in manifest.tensors.items()
            for index, block in enumerate(tensor.blocks)
        }

    def close(self) -> None:
        """Let go of the files."""
        while self._open:
            self._open.popitem()[1][0].close()

    def _written(self, rank: int, name: str) -> int:
        word = int(self._of(rank)[1][0])
        if word >> VERSION_SHIFT != self.version:
            raise WeightSyncError(f"rank {rank} has given up writing weight version {self.version}, {name} in it")
        return (word & (1 << VERSION_SHIFT) - 1) * ALIGNMENT

    def _lives(self, rank: int) -> bool:
        file = self._of(rank)[0]
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
        return False

    def _of(self, rank: int) -> tuple[BinaryIO, np.ndarray]:
        if rank not in self._open:
            path = ledger_path(self.folder, rank, self.version)
            try:
                file = path.open("rb")
            except OSError as error:
                raise WeightSyncError(f"rank {rank}: {path} cannot be read: {error.strerror}") from error
            self._open[rank] = file, np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint64)
        return self._open[rank]
