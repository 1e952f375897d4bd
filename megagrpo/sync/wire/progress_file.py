"""Progress of each trainer rank that writes its blocks, for workers that read the blocks while the rank writes.

A rank keeps one file of 8 bytes per slot, beside the blocks: the version and the number of bytes written. The rank
holds a lock on the file; the kernel releases the lock when the rank dies.
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

from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.tensor_index import ALIGNMENT

NUM_SLOTS = 2
WORD_BYTES = 8  # size of a progress file
VERSION_SHIFT = 40  # the lower bits count bytes written, in units of ALIGNMENT: up to 64 TiB
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 50e-6, 1e-3  # seconds between two polls of a rank's progress
LIVENESS_SECONDS = 0.1  # seconds between two checks that a late rank is alive
_FENCE = threading.Lock()


def progress_path(folder: Path, rank: int, version: int) -> Path:
    """Return the path of rank `rank`'s progress file for the slot of `version`."""
    return folder / f"rank{rank}.progress{version % NUM_SLOTS}"


def fence() -> None:
    """Memory fence: other processes see this thread's earlier reads and writes before its later ones.

    Acquiring a lock holds back later operations, and releasing it holds back earlier ones. No processor moves an
    acquire before a release that precedes it. So no operation crosses the release and acquire in the middle. x86 keeps
    the order of stores and of loads anyway; ARM does not.
    """
    for _ in range(2):
        with _FENCE:
            pass


class ProgressFile:
    """The progress of one slot, on the writing side. `word` [1] uint64 maps the file `path`; `close` releases the lock.

    Version and bytes written share one word, stored atomically: a reader cannot mistake an older version's progress for
    this one's. Raises BlockingIOError when another process holds the lock.
    """

    def __init__(self, path: Path, word: np.ndarray):
        self.word = word
        self._file = path.open("rb")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def begin(self, version: int) -> None:
        """Start `version` with nothing written."""
        self._set_progress(version << VERSION_SHIFT)

    def record(self, version: int, end: int) -> None:
        """Record that everything before byte `end` is written. `end` is rounded up to ALIGNMENT."""
        self._set_progress(version << VERSION_SHIFT | -(-end // ALIGNMENT))

    def withdraw(self) -> None:
        """Give up the version in progress: readers that wait for it get an error."""
        self._set_progress(0)

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()

    def _set_progress(self, word: int) -> None:
        fence()  # blocks become visible before the progress
        self.word[0] = word


class ActivityFile:
    """The current activity of a process, one line in a file that other processes can read while this process hangs."""

    SIZE = 512

    def __init__(self, path: Path):
        path.write_bytes(bytes(self.SIZE))
        with path.open("r+b") as file:
            self._line = mmap.mmap(file.fileno(), self.SIZE)

    def write(self, text: str) -> None:
        """Replace the line, cut to 511 bytes; takes about a microsecond."""
        line = text.encode()[: self.SIZE - 1] + b"\0"
        self._line[: len(line)] = line

    @staticmethod
    def read(path: Path) -> str:
        """Return the line in the file at `path`."""
        return path.read_bytes().partition(b"\0")[0].decode(errors="replace")


class ProgressReader:
    """The progress files of all ranks in `folder`, on the reading side, for one version.

    A rank unfinished `seconds` after construction is an error (None: no limit). `note` gets each wait's description.
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
        self._open: dict[int, tuple[BinaryIO, np.ndarray]] = {}  # rank -> file, its word
        self._written_before: dict[int, int] = {}  # rank -> lower bound of the bytes written

    def wait_for(self, rank: int, end: int, name: str) -> None:
        """Wait until `rank` has written all its blocks before byte `end`, including the tensor `name`.

        Raises WeightSyncError when the rank is late, has died, or has given up this version.
        """
        if self._written_before.get(rank, 0) >= end:
            return
        pause, checked = MIN_POLL_SECONDS, time.monotonic()
        while (written := self._written(rank, name)) < end:
            if (now := time.monotonic()) > self.ends:
                raise WeightSyncError(f"rank {rank} has not written {name} within {self.seconds:g} s")
            if pause == MIN_POLL_SECONDS:
                self.note(f"the load of {name}, which rank {rank} has not written")
            if now - checked > LIVENESS_SECONDS:
                if not self._lives(rank) and self._written(rank, name) < end:
                    raise WeightSyncError(f"rank {rank} died and has not written {name}")
                checked = now
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)
        fence()  # read the blocks only after the progress that covers them
        self._written_before[rank] = written

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1][0].close()

    def _written(self, rank: int, name: str) -> int:
        word = int(self._file_of(rank)[1][0])
        if word >> VERSION_SHIFT != self.version:
            raise WeightSyncError(f"rank {rank} aborted weight version {self.version}, which contains {name}")
        return (word & (1 << VERSION_SHIFT) - 1) * ALIGNMENT

    def _lives(self, rank: int) -> bool:
        file = self._file_of(rank)[0]
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
        return False

    def _file_of(self, rank: int) -> tuple[BinaryIO, np.ndarray]:
        if rank not in self._open:
            path = progress_path(self.folder, rank, self.version)
            try:
                file = path.open("rb")
            except OSError as error:
                raise WeightSyncError(f"rank {rank}: {path} cannot be read: {error.strerror}") from error
            self._open[rank] = file, np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint64)
        return self._open[rank]
