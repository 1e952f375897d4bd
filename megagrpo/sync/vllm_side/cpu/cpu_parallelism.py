"""Parallelism and experts in vLLM for CPU: patches for experts, copies, pipeline stages and several nodes."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def use_expert_map() -> None:
    """Give experts of other workers weight 0 on this worker, so that the sum over workers covers all experts.

    vLLM for CPU (seen in 0.32) passes global expert indices to the kernel. The kernel then reads past the end of the
    worker's weights, and the server dies in its first forward pass. The patched method raises NotImplementedError for
    models that weigh the inputs of their experts. Remove this patch when a server with `--enable-expert-parallel`
    responds without it; the tests check that.
    """
    if hasattr(CPUUnquantizedExperts.apply, "__wrapped__"):
        return
    original = CPUUnquantizedExperts.apply

    @functools.wraps(original)
    def apply(self: CPUUnquantizedExperts, **arguments: Any) -> None:
        if (expert_map := arguments["expert_map"]) is not None:
            if arguments["apply_router_weight_on_input"]:
                raise NotImplementedError(
                    "vLLM for CPU: expert parallelism does not support apply_router_weight_on_input"
                )
            local = expert_map[arguments["topk_ids"].long()]  # -1 for an expert of another worker
            arguments["topk_weights"] = arguments["topk_weights"].masked_fill(local < 0, 0.0)
            arguments["topk_ids"] = local.clamp(min=0).to(arguments["topk_ids"].dtype)
        original(self, **arguments)

    CPUUnquantizedExperts.apply = apply


def exchange_tokens() -> None:
    """Let data-parallel copies gather each other's tokens, and add up their experts' outputs.

    vLLM for CPU (seen in 0.32) has an all-to-all manager, but its communicator lacks the two collectives that the
    manager calls. The first request then ends the server with a NotImplementedError. Remove this patch when a server
    with `--data-parallel-size 2` and `--enable-expert-parallel` responds without it; the tests check that.
    """
    if "all_gatherv" in vars(CpuCommunicator):
        return

    def all_gatherv(
        self: CpuCommunicator, tensors: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> Any:
        """Concatenate the tensors [size of the rank, ...] of all ranks. Rows are padded: gloo gathers equal sizes."""
        if isinstance(tensors, list):
            return [all_gatherv(self, tensor, dim, sizes) for tensor in tensors]
        sizes = sizes or [tensors.shape[0]] * self.world_size
        padded = tensors.new_zeros(max(sizes), *tensors.shape[1:])
        padded[: tensors.shape[0]] = tensors
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self.device_group)
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])

    def reduce_scatterv(self: CpuCommunicator, rows: Tensor, dim: int = 0, sizes: list[int] | None = None) -> Tensor:
        """Return this rank's part of the sum of the tensors [all rows, ...] of all ranks."""
        total = rows.clone()
        dist.all_reduce(total, group=self.device_group)
        return total.split(sizes or rows.shape[0] // self.world_size)[self.rank_in_group].contiguous()

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


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


def count_workers_of_a_node() -> None:
    """Let workers of one node answer through shared memory, and workers of other nodes through sockets.

    vLLM (seen in 0.32) takes the number of GPUs of a host as the number of workers of a node. Without GPUs it takes
    each worker for a node, so a node with two workers does not start: its executor finds no queue in shared memory
    (AssertionError). Remove this patch when a server of four workers on two nodes responds without it; the tests check
    that.
    """
    # imports most of vLLM, which the plugin loader has not done in every process
    from vllm.v1.executor.multiproc_executor import WorkerProc

    if hasattr(WorkerProc._init_message_queues, "__wrapped__"):
        return
    original = WorkerProc._init_message_queues

    @functools.wraps(original)
    def init_message_queues(self: Any, input_shm_handle: Any, vllm_config: Any) -> None:
        workers = vllm_config.parallel_config.local_world_size
        current_platform.device_count = lambda: workers
        try:
            original(self, input_shm_handle, vllm_config)
        finally:
            del current_platform.device_count

    WorkerProc._init_message_queues = init_message_queues


def compute_frozen_experts() -> None:
    """Compute experts with the CPU's kernel in a server that takes adapters.

    vLLM (seen in 0.32) then chooses Triton's kernel for experts, adapted or not, and the first request ends the server.
    Adapters of experts are refused (`config/sections/lora.py`). Remove this patch when a server on a mixture with
    `--enable-lora` responds without it; the tests check that.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    original = method.select_unquantized_moe_backend
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def select(moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return original(moe_config)

    method.select_unquantized_moe_backend = select
