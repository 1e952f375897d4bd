"""An unfinished folder: written under another name, resumed after a kill, and renamed when it is complete."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from megagrpo.platform.parallel.agree import on_first_rank, run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.cleanup.removal import remove

_PURPOSE = "purpose.json"


class Unfinished:
    """The folder `path` beside `folder`; `publish` renames it to `folder`. Collective.

    Files of a killed process are kept if written for the same `purpose`, else deleted. Raises ValueError when `folder`
    is not empty, another process writes it, or `path` is a link or a folder that this class did not make.
    """

    def __init__(self, folder: Path, layout: Layout, purpose: dict[str, Any]):
        self.folder, self.path = folder, folder.with_name(f".{folder.name}.partial")
        self._layout, self._lock = layout, -1
        on_first_rank(layout, lambda: self._claim(purpose))
        self.journal = run_own_and_agree(layout, lambda: Journal(self.path / f"journal_{layout.world_rank}.jsonl"))

    def _claim(self, purpose: dict[str, Any]) -> None:
        refuse_taken(self.folder)
        stamp, fresh = self.path / _PURPOSE, (self.path / _PURPOSE).with_suffix(".new")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # the kernel releases the lock when the process ends
            self._lock = os.open(self.path, os.O_DIRECTORY | os.O_NOFOLLOW)
            foreign = not stamp.is_file() and any(path != fresh for path in self.path.iterdir())
        except (FileExistsError, NotADirectoryError):
            foreign = True
        if foreign:
            fix = f"rename it, or name another folder than {self.folder}"
            raise ValueError(f"{self.path} was not made by this command; {fix}")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = f"{self.folder} is being written by another process"
            raise ValueError(f"{busy}; wait for it, or name another folder") from None
        text = json.dumps(purpose, sort_keys=True)
        if not stamp.exists() or stamp.read_text() != text:
            for purpose_now in ("", text):  # the stamp comes first and last: a kill between leaves files for no purpose
                fresh.write_text(purpose_now)
                fresh.rename(stamp)
                for old in set(self.path.iterdir()) - {stamp}:
                    remove(old)

    def check_space(self, needed: int) -> None:
        """Raises OSError on every rank when the disk has less than the sum of all ranks' `needed` bytes. `needed`
        excludes bytes already written. Collective."""
        needed = int(self._layout.all_reduce(torch.tensor(needed)))
        on_first_rank(self._layout, lambda: check_space(self.path, needed))

    def publish(self) -> None:
        """Rename the folder to its final name. Collective: no rank may write any longer."""
        self.journal.close()
        on_first_rank(self._layout, self._publish)

    def _publish(self) -> None:
        for own in [self.path / _PURPOSE, *self.path.glob("journal_*.jsonl")]:
            remove(own)
        self.path.rename(self.folder)
        os.close(self._lock)

    def discard(self) -> None:
        """Remove everything written, as a retry would fail again. Every rank calls it; no rank waits for another."""
        self.journal.close()
        if self._layout.world_rank == 0:
            remove(self.path)
            os.close(self._lock)


class Journal:
    """A log with one JSON line per unit that is safely on the disk. `lines` holds the lines of an earlier attempt."""

    def __init__(self, path: Path):
        text = path.read_bytes() if path.exists() else b""
        text = text[: text.rfind(b"\n") + 1]  # a kill may truncate the last line
        self.lines: list[Any] = [json.loads(line) for line in text.splitlines()]
        self._file = open(path, "r+b" if path.exists() else "wb")
        self._file.truncate(len(text))
        self._file.seek(len(text))

    def write(self, lines: list[Any]) -> None:
        """Append lines about units that are already synced to the disk, and sync them."""
        self._file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def refuse_taken(folder: Path) -> None:
    """Raises ValueError when `folder` is a file or is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; name a new folder or remove it")


def check_space(folder: Path, needed: int) -> None:
    """Raises OSError when the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        sizes = f"{needed / 1e9:.2f} GB more needed, {free / 1e9:.2f} GB free"
        raise OSError(f"not enough disk space for {folder}: {sizes}")
