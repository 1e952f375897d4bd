"""Names of files in /dev/shm that contain the owning process, so that the next start can remove the files of a killed process.

An owner is PID.START_TIME, because process ids are reused. Files of this run's weights begin with `megagrpo-OWNER-`. Segments that vLLM
creates through Python's `multiprocessing.shared_memory` begin with `psm_megagrpo-OWNER-`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from multiprocessing import shared_memory
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
UNMAPPED_SECONDS = 60.0  # starting workers map a file soon after one of them has created it
WEIGHTS, SEGMENTS = "megagrpo-", "psm_megagrpo-"


def owner(pid: int) -> str:
    """Return PID.START_TIME of a running process, or "" when no such process runs."""
    try:
        return f"{pid}.{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return ""


def name_segments_by_owner() -> None:
    """Make `multiprocessing.shared_memory` name every segment after the process that creates it, in this process and its children."""
    shared_memory._make_filename = lambda: f"/{SEGMENTS}{owner(os.getpid())}-{secrets.token_hex(4)}"


def remove_stale(folder: Path = SHARED_MEMORY) -> None:
    """Remove weights and segments in `folder` whose owner no longer runs."""
    for prefix in (WEIGHTS, SEGMENTS):
        for path in folder.glob(f"{prefix}*"):
            named = path.name.removeprefix(prefix)
            pid = named.split(".")[0]
            if pid.isdigit() and named.rpartition("-")[0] == owner(int(pid)):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
    _remove_unmapped(folder)


def _remove_unmapped(folder: Path) -> None:
    """Remove files of vLLM's CPU workers (tp above 1) that are old and that no process has mapped; their names contain no process."""
    found = []
    for path in folder.glob("vllm_dist_*"):
        with contextlib.suppress(OSError):
            state = path.stat()
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > UNMAPPED_SECONDS:
                found.append(path)
    if not found:
        return
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text()
    for path in found:
        if str(path) not in mapped:
            path.unlink(missing_ok=True)
