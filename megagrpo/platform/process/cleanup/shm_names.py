"""Names files in /dev/shm by their owning process, so that the next start can remove a killed process's files.

Every process that creates files has a folder `megagrpo-OWNER`, whose lock tells whether the process lives
(`ownership.py`). A trainer keeps its weights in that folder. Segments that vLLM creates through Python's
`multiprocessing.shared_memory` begin with `psm_megagrpo-OWNER-`, those of its CPU workers (tp above 1) with
`vllm_dist_megagrpo-OWNER-`, where the owner is their EngineCore.
"""

from __future__ import annotations

import functools
import os
import secrets
from pathlib import Path

from megagrpo.platform.process.cleanup.ownership import make_folder, owner_in, remove_left

SHARED_MEMORY = Path("/dev/shm")
FOLDER, SEGMENTS, CPU_WORKERS = "megagrpo-", "psm_megagrpo-", "vllm_dist_megagrpo-"


def owned(label: str) -> str:
    """Return a name for a new file of this process in /dev/shm: LABEL, owner and random characters."""
    return f"{label}{_owner(os.getpid())}-{secrets.token_hex(4)}"


@functools.cache
def _owner(pid: int) -> str:
    """Create this process's folder, locked until the process ends, and return its name's owner. A fork has its own."""
    return owner_in(make_folder(FOLDER, SHARED_MEMORY)[0].name, FOLDER)


def name_segments_by_owner() -> None:
    """Make `multiprocessing.shared_memory` name segments after the creating process, here and in child processes."""
    from multiprocessing import shared_memory

    vars(shared_memory).update(_make_filename=lambda: f"/{owned(SEGMENTS)}")


def remove_stale(folder: Path = SHARED_MEMORY) -> None:
    """Remove weights and segments in `folder` whose owner has ended."""
    remove_left(folder, FOLDER, (SEGMENTS, CPU_WORKERS))
