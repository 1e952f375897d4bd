"""Servers on several nodes in vLLM for CPU: a patch that tells which workers share a node."""

from __future__ import annotations

import functools
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import WorkerProc


def count_workers_of_a_node() -> None:
    """Let workers of one node answer through shared memory, and workers of other nodes through sockets.

    vLLM (seen in 0.32) takes the number of GPUs of a host as the number of workers of a node. Without GPUs it takes
    each worker for a node, so a node with two workers does not start: its executor finds no queue in shared memory
    (AssertionError). Remove this patch when a server of four workers on two nodes responds without it; the tests check
    that.
    """
    if hasattr(WorkerProc._init_message_queues, "__wrapped__"):
        return
    original = WorkerProc._init_message_queues

    @functools.wraps(original)
    def init_message_queues(self: WorkerProc, input_shm_handle: Any, vllm_config: Any) -> None:
        workers = vllm_config.parallel_config.local_world_size
        current_platform.device_count = lambda: workers
        try:
            original(self, input_shm_handle, vllm_config)
        finally:
            del current_platform.device_count

    WorkerProc._init_message_queues = init_message_queues
