"""The environment variables that this project declares, and the one module that reads and writes `os.environ`.

`environment.py` decides what happens to the variables that others set.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping

TOKEN_VARIABLE = "MEGAGRPO_TOKEN"  # the token of the servers and, on several nodes, of the ranks
TOKEN_FILE_VARIABLE = "MEGAGRPO_TOKEN_FILE"  # the file that holds the token
# the folder in which the ranks of one node meet; megagrpo/cluster/launch/launcher_rendezvous.py makes it
RENDEZVOUS_VARIABLE = "MEGAGRPO_RENDEZVOUS"
LAUNCHER_VARIABLE = "MEGAGRPO_LAUNCHER_PID"  # the launcher of ranks sets it to its process id before it starts them
# hold the index of this node in a Slurm step, or in a job of Kubernetes
NODE_INDICES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")

ENVIRONMENT: MutableMapping[str, str] = os.environ  # of this process, and of the children that it starts


def number(name: str, default: int) -> int:
    """Return a variable such as WORLD_SIZE, RANK or LOCAL_WORLD_SIZE as a number. Raises ValueError for other text."""
    return int(ENVIRONMENT.get(name, default))


def put(values: Mapping[str, str | None]) -> None:
    """Set variables for this process and the children that it starts; None removes one."""
    for name, value in values.items():
        ENVIRONMENT.pop(name, None) if value is None else ENVIRONMENT.update({name: value})


@contextlib.contextmanager
def changed(values: Mapping[str, str | None]) -> Iterator[None]:
    """Context manager: variables as `put` sets them; their previous values return at its end."""
    before = {name: ENVIRONMENT.get(name) for name in values}
    put(values)
    try:
        yield
    finally:
        put(before)


OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""How OpenMP's threads wait on a CPU: they spin for 10,000 iterations, 0.1 to 0.5 milliseconds, and then sleep.

Without spinning, each operation on two threads wakes a sleeping thread: a bf16 step takes 1.3 times as long
(`benchmarks/step_cost.py`). With the default, many milliseconds, waiting threads take the cores from computing threads.
"""

KEPT_BYTES = 32 * 2**20
"""Size of the largest tensor whose memory a process without a GPU keeps for its next tensors
(`device.reuse_freed_memory`): glibc's limit."""
# In the kernel's default pages of 4 KiB, new memory for the weights of a sync takes longer than their copy.
MALLOC = f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold={KEPT_BYTES}:glibc.malloc.trim_threshold={2**31 - 1}"
"""GLIBC_TUNABLES of a vLLM server without a GPU: it allocates in huge pages and keeps freed memory like the trainer."""
