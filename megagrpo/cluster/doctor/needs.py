"""What a run needs of a machine; the defaults are what any run needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SMALLEST_SHM = 1.0  # GiB: NCCL, vLLM and torch's data loaders use some; Docker's default of 64 MiB is too small
SMALLEST_RAM = 8.0  # GiB for Python, libraries and one server of a small model
SMALLEST_DISK = 10.0  # GiB for logs and a checkpoint of a small model


@dataclass(frozen=True)
class Needs:
    """What one node of a run needs. Sizes are in GiB. `source` is the run's name, or "any run"."""

    source: str = "any run"
    gpus: int = 0  # GPUs of one node; 0: unknown
    nodes: int = 1
    shared_memory: float = SMALLEST_SHM
    ram: float = SMALLEST_RAM
    disk: float = SMALLEST_DISK
    one_connection: bool = False  # tp or cp, which need CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell
    shares_gpu: bool = True  # trainer and vLLM are two processes on one GPU
    agents: tuple[str | dict[str, Any], ...] = ()  # values of multi_turn.agent
    unseen: str = ""  # why the size of the model is unknown
