"""Names of files in /dev/shm that contain the owning process, so that the next start can remove the files of a killed process.

An owner is PID.START_TIME, because process ids are reused. Files of this run's weights begin with `megagrpo-OWNER-`. Segments that vLLM
creates through Python's `multiprocessing.shared_memory` begin with `psm_megagrpo-OWNER-`, those of its CPU workers (tp above 1) with
`vllm_dist_megagrpo-OWNER-`, where the owner is their EngineCore.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from multiprocessing import shared_memory
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
WEIGHTS, SEGMENTS, CPU_WORKERS = "megagrpo-", "psm_megagrpo-", "vllm_dist_megagrpo-"


def owner(pid: int) -> str:
    """Return PID.START_TIME of a running process, or "" when no such process runs. A zombie does not run: init may never reap it."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{pid}.{fields[18]}"


def owned(prefix: str) -> str:
    """Return a name for a new file of this process: PREFIX, owner and random characters."""
    return f"{prefix}{owner(os.getpid())}-{secrets.token_hex(4)}"


def name_segments_by_owner() -> None:
    """Make `multiprocessing.shared_memory` name every segment after the process that creates it, in this process and its children."""
    vars(shared_memory).update(_make_filename=lambda: f"/{owned(SEGMENTS)}")


def remove_stale(folder: Path = SHARED_MEMORY) -> None:
    """Remove weights and segments in `folder` whose owner no longer runs."""
    for prefix in (WEIGHTS, SEGMENTS, CPU_WORKERS):
        for path in folder.glob(f"{prefix}*"):
            named = path.name.removeprefix(prefix).partition("-")[0]
            pid = named.partition(".")[0]
            if pid.isdigit() and named == owner(int(pid)):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
