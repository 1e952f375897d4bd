"""`run_ranks` for tests: `results = run_ranks(function, 4, *args)`. The ranks are forks of pytest's process. Start
threads (loading with transformers, servers) and process groups in a rank, never in pytest's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megagrpo.platform import device
from megagrpo.platform.parallel import spawn
from megagrpo.platform.parallel.spawn import RankFailed as RankFailed

SLOW_START = 5  # where a GPU is seen ranks are fresh interpreters, which start slowly

torch.set_num_threads(1)  # a fork cannot use its parent's OpenMP pool, so the parent must have none
if not device.has_gpu():
    # The first backward pass starts a thread per device, with which no fork could run one. Only the CPU is a device
    # until a FakeTensorMode adds another.
    torch.ones(1, requires_grad=True).sum().backward()


def run_ranks(function: Callable[..., Any], n: int, *args: Any, timeout: float = 120.0, **options: Any) -> list[Any]:
    """`megagrpo.platform.parallel.spawn.run_ranks` without oneDNN on CPUs, and with more time where a GPU is seen."""
    timeout *= SLOW_START if device.has_gpu() else 1
    return spawn.run_ranks(_without_onednn, n, function, *args, timeout=timeout, **options)


def _without_onednn(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` with torch's own products. oneDNN prepares each new shape for 0.4 ms and 165 page faults, in
    each fork again, which is a quarter of a small bf16 step; runs of the commands use it."""
    torch.backends.mkldnn.enabled = False
    return function(*args)
