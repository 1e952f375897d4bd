"""Expert parallelism in vLLM for CPU: its kernel is told which of a worker's own experts are meant."""

from __future__ import annotations

import functools
from typing import Any

from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def heed_expert_map() -> None:
    """Have the experts of other workers count for nothing on this one; the sum over workers is then that of all experts.

    vLLM for CPU (seen in 0.32) gives the kernel the experts' numbers in the whole model, and the kernel reads past the end of the weights
    that the worker holds: the server dies in its first forward pass. It can go when a server with `--enable-expert-parallel` answers
    without it, which the tests tell.
    """
    if hasattr(CPUUnquantizedExperts.apply, "__wrapped__"):
        return
    original = CPUUnquantizedExperts.apply

    @functools.wraps(original)
    def apply(self: CPUUnquantizedExperts, **given: Any) -> None:
        if (expert_map := given["expert_map"]) is not None:
            if given["apply_router_weight_on_input"]:
                raise NotImplementedError("vLLM for CPU: expert parallelism of a model that weighs the inputs of its experts")
            own = expert_map[given["topk_ids"].long()]  # -1 where another worker has it
            given["topk_weights"] = given["topk_weights"].masked_fill(own < 0, 0.0)
            given["topk_ids"] = own.clamp(min=0).to(given["topk_ids"].dtype)
        original(self, **given)

    CPUUnquantizedExperts.apply = apply
