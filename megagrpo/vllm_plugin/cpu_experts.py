"""Expert parallelism in vLLM for CPU: a patch that gives the kernel a worker's local expert indices."""

from __future__ import annotations

import functools
from typing import Any

from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def use_expert_map() -> None:
    """Give experts of other workers weight 0 on this worker, so that the sum over workers covers all experts.

    vLLM for CPU (seen in 0.32) passes global expert indices to the kernel. The kernel then reads past the end of the worker's weights, and
    the server dies in its first forward pass. The patched method raises NotImplementedError for models that weigh the inputs of their
    experts. Remove this patch when a server with `--enable-expert-parallel` responds without it; the tests check that.
    """
    if hasattr(CPUUnquantizedExperts.apply, "__wrapped__"):
        return
    original = CPUUnquantizedExperts.apply

    @functools.wraps(original)
    def apply(self: CPUUnquantizedExperts, **arguments: Any) -> None:
        if (expert_map := arguments["expert_map"]) is not None:
            if arguments["apply_router_weight_on_input"]:
                raise NotImplementedError("vLLM for CPU: expert parallelism does not support apply_router_weight_on_input")
            local = expert_map[arguments["topk_ids"].long()]  # -1 for an expert of another worker
            arguments["topk_weights"] = arguments["topk_weights"].masked_fill(local < 0, 0.0)
            arguments["topk_ids"] = local.clamp(min=0).to(arguments["topk_ids"].dtype)
        original(self, **arguments)

    CPUUnquantizedExperts.apply = apply
