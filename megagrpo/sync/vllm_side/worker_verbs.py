"""Methods of vLLM's workers that the trainer calls over `/collective_rpc`. `--worker-extension-cls` adds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megagrpo.sync.wire.copy_checksums import checksum


class WorkerVerbs:
    """The methods for `/collective_rpc`. They never raise; `engine.ShardEngine` explains why."""

    # of vLLM's worker; an annotation alone adds no attribute, which vLLM would reject
    weight_transfer_engine: Any
    finish_weight_update: Callable[[], None]
    vllm_config: Any
    model_runner: Any

    def end_weight_update(self) -> None:
        """End a weight update that the trainer has started and not finished, if any."""
        if self.weight_transfer_engine.open:
            self.finish_weight_update()

    def weight_update_report(self) -> str:
        """Return this worker's report on the last weight update as JSON, or "", for a trainer that received none."""
        return self.weight_transfer_engine.report

    def quantization(self) -> str:
        """Return the quantization that is applied to loaded weights, as a value of `rollout.quantization`."""
        return self.vllm_config.model_config.quantization or "none"

    def adapter_checksums(self) -> dict[str, list[str]]:
        """Return projection (layers.0.self_attn.q_proj) -> [checksum of A, checksum of B * scale] of the last adapter.

        A and B are whole, in vLLM's adapter dtype. Checksums are text: other JSON readers have no 64-bit integers.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        adapters = manager.list_adapters()
        if not adapters:
            return {}
        sums: dict[str, list[str]] = {}
        for name, weights in adapters[max(adapters)].loras.items():
            packed = isinstance(weights.lora_a, list)
            names = manager.packed_modules[name] if packed else [name]
            a, b = (weights.lora_a, weights.lora_b) if packed else ([weights.lora_a], [weights.lora_b])
            sums |= {
                projection: [_sum(x), _sum(y)] for projection, x, y in zip(names, a, b, strict=True) if x is not None
            }
        return {name.partition("model.")[2]: of_adapter for name, of_adapter in sums.items()}


def _sum(values: Tensor) -> str:
    """Return the checksum of `values` [...] as text."""
    return str(checksum(values.cpu().contiguous()))
