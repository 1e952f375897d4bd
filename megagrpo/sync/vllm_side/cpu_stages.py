"""Pipeline parallelism in vLLM for CPU: a patch creates a stage's buffers for the previous stage's hidden states."""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def make_stage_buffers() -> None:
    """Create the buffers before the first forward pass of a stage.

    vLLM (seen in 0.32) creates them in the warm-up, which it leaves out on a CPU with eager execution and a given cache
    size. The first request then ends the server with an AssertionError. Remove this patch when a server with
    `--pipeline-parallel-size 2` responds without it; the tests check that.
    """
    if hasattr(CPUModelRunner.sync_and_gather_intermediate_tensors, "__wrapped__"):
        return
    original = CPUModelRunner.sync_and_gather_intermediate_tensors

    @functools.wraps(original)
    def gather(self: CPUModelRunner, *arguments: Any, **named: Any) -> Any:
        if self.intermediate_tensors is None:
            made = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
            self.intermediate_tensors = made
        return original(self, *arguments, **named)

    CPUModelRunner.sync_and_gather_intermediate_tensors = gather
