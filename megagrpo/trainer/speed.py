"""Speed and memory of a step: tokens per second, model FLOPs utilization (MFU), and memory of ranks and host."""

from __future__ import annotations

from functools import cached_property

import torch

from megagrpo.config import RunConfig
from megagrpo.platform import device
from megagrpo.platform.device import memory_in_use
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.proof.plan.flops import step_flops
from megagrpo.proof.plan.gpu_specs import bf16_tflops_of
from megagrpo.proof.plan.times import server_gpus
from megagrpo.types import ComputedTokens


class Speed:
    """Counts the FLOPs of a step's optimizer steps, and derives metrics from a step's tokens and times."""

    def __init__(self, config: RunConfig, layout: Layout, policy: MegatronPolicy):
        self._config, self._layout, self._policy = config, layout, policy
        self._flops = 0.0

    @cached_property
    def _num_devices(self) -> int:
        """GPUs of the trainer and of dedicated servers; on a machine without GPUs the ranks."""
        alone = self._config.rollout.placed == "colocated" or not device.has_gpu()
        return self._layout.world_size + (0 if alone else server_gpus(self._config))

    @cached_property
    def _peak(self) -> float | None:
        return peak_flops(self._config)

    def count(self, tokens: ComputedTokens) -> None:
        """Count the FLOPs of one optimizer step on these tokens."""
        self._flops += step_flops(
            self._policy.hf_config, tokens.spans, tokens.num_loss, frozen=self._config.lora.enabled
        )

    def metrics(self, num_tokens: float, num_generated: float, times: dict[str, float]) -> dict[str, float]:
        """Return the step's rates, and memory. Collective.

        `num_tokens` are the tokens of all samples, `num_generated` the tokens of all responses. Generation that runs
        ahead is as long as the step. MFU is the share of the peak that forward and backward passes use during
        `time/train`, over all ranks; it is left out without a known peak.
        """
        flops, self._flops = self._flops, 0.0
        step, ahead = times["time/step"], self._config.rollout.max_staleness > 0
        rates = {
            "tokens_per_second": num_tokens / step,
            "tokens_per_second_per_gpu": num_tokens / step / self._num_devices,
        }
        if generating := step if ahead else times.get("time/generate", 0.0):
            rates["generated_tokens_per_second"] = num_generated / generating
        if self._peak is not None and (training := times.get("time/train", 0.0)):
            rates["mfu"] = flops / (training * self._layout.world_size * self._peak)
        return rates | self._memory()

    def _memory(self) -> dict[str, float]:
        """Return the memory of rank 0, of the fullest rank, and of rank 0's host, in GiB."""
        ranks = self._layout.all_gather_objects(
            {"resident_max_gb": memory_in_use.resident_gb()} | memory_in_use.gpu_peaks()
        )
        fullest = {f"memory/{name}": max(rank[name] for rank in ranks) for name in ranks[0]}
        first = {"memory_gb": device.memory_gb(), "memory/resident_gb": ranks[0]["resident_max_gb"]}
        return first | fullest | {"memory/host_gb": memory_in_use.host_used_gb()}


def peak_flops(config: RunConfig) -> float | None:
    """Return the peak FLOP/s of one rank's device in BF16: `run.peak_tflops`, else the data sheet's value for a known
    GPU, else None."""
    tflops = config.run.peak_tflops
    if tflops is None and device.has_gpu() and device.resolve_precision(config.model.precision) == torch.bfloat16:
        tflops = bf16_tflops_of(device.name())
    return None if tflops is None else tflops * 1e12
