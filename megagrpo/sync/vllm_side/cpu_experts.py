"""Expert parallelism in vLLM for CPU: patches give the kernel local expert indices and send tokens between copies."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


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
