"""What the trainer asks of every vLLM worker over `/collective_rpc`: mixed into vLLM's worker class by `--worker-extension-cls`."""

from __future__ import annotations

from torch import Tensor

from megagrpo.transfer.checksums import checksum


class WorkerVerbs:
    """None of them raises, see `engine.ShardEngine`."""

    def end_weight_update(self) -> None:
        """Leave a weight update that a trainer has begun and not finished, if there is one."""
        if self.weight_transfer_engine.open:
            self.finish_weight_update()

    def weight_update_error(self) -> str:
        """What went wrong here in the last weight update, for a trainer that has got no report; "" when nothing did."""
        return self.weight_transfer_engine.error

    def quantization(self) -> str:
        """What is made of weights as they are loaded, as `rollout.quantization` calls it."""
        return self.vllm_config.model_config.quantization or "none"

    def adapter_checksums(self) -> dict[str, list[str]]:
        """Of the adapter that came last: projection, as in layers.0.self_attn.q_proj -> checksums of A and of B times the scale, whole, in
        the dtype that vLLM computes adapters in. As text: JSON's other readers have no 64-bit integers."""
        manager = self.model_runner.lora_manager._adapter_manager
        found = manager.list_adapters()
        if not found:
            return {}
        told: dict[str, list[str]] = {}
        for name, weights in found[max(found)].loras.items():
            packed = isinstance(weights.lora_a, list)
            names = manager.packed_modules[name] if packed else [name]
            a, b = (weights.lora_a, weights.lora_b) if packed else ([weights.lora_a], [weights.lora_b])
            told |= {projection: [_sum(x), _sum(y)] for projection, x, y in zip(names, a, b, strict=True) if x is not None}
        return {name.partition("model.")[2]: sums for name, sums in told.items()}


def _sum(values: Tensor) -> str:
    return str(checksum(values.cpu().contiguous()))
