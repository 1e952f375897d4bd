"""Memory in use, in GiB: of this process, of its GPU, and of its host."""

from __future__ import annotations

import psutil
import torch


def gpu_peaks() -> dict[str, float]:
    """Return the peaks so far of the memory that tensors of this process occupy on its GPU (`allocated_gb`), and that
    torch's allocator holds there (`reserved_gb`); empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    return {
        "allocated_gb": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gb": torch.cuda.max_memory_reserved() / 2**30,
    }


def resident_gb() -> float:
    """Return the resident memory of this process now."""
    return psutil.Process().memory_info().rss / 2**30


def host_used_gb() -> float:
    """Return the RAM of this host that is not available now, of all processes."""
    memory = psutil.virtual_memory()
    return (memory.total - memory.available) / 2**30
