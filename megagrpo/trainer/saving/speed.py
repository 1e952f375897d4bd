"""Speed and memory of a step: tokens per second, model FLOPs utilization (MFU), and memory of ranks and host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megagrpo.config import RolloutSection
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.flops import step_flops
from megagrpo.planner.costs.gpu_specs import bf16_tflops_of
from megagrpo.platform import device
from megagrpo.platform.device import memory_in_use
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.records.rows.recorder import Recorder, Update


@dataclass
class Speed(Recorder):
    """Counts the FLOPs of a step's optimizer steps, and derives metrics from a step's tokens and times.

    `num_devices` are the GPUs of the trainer and of dedicated servers; on a machine without GPUs the ranks. `peak` is
    the peak FLOP/s of one rank's device, if known. With `frozen` only adapters are trained. With `runs_ahead`
    generation is as long as the step.
    """

    layout: Layout
    hf_config: HfConfig
    num_devices: int
    peak: float | None
    frozen: bool
    runs_ahead: bool
    _flops: float = 0.0

    def after_update(self, update: Update) -> None:
        """Count the FLOPs of one optimizer step."""
        tokens = update.batch.computed
        self._flops += step_flops(self.hf_config, tokens.spans, tokens.num_loss, frozen=self.frozen)

    def metrics(self, num_tokens: float, num_generated: float, times: dict[str, float]) -> dict[str, float]:
        """Return the step's rates, and memory. Collective.

        `num_tokens` counts the tokens of samples, `num_generated` the tokens of responses. MFU is forward and backward
        passes' share of the peak during `time/train`, over all ranks. Without a known peak it is left out.
        """
        flops, self._flops = self._flops, 0.0
        step = times["time/step"]
        rates = {
            "tokens_per_second": num_tokens / step,
            "tokens_per_second_per_gpu": num_tokens / step / self.num_devices,
        }
        if generating := step if self.runs_ahead else times.get("time/generate", 0.0):
            rates["generated_tokens_per_second"] = num_generated / generating
        if self.peak is not None and (training := times.get("time/train", 0.0)):
            rates["mfu"] = flops / (training * self.layout.world_size * self.peak)
        return rates | self._memory()

    def _memory(self) -> dict[str, float]:
        """Return the memory of this rank, of the fullest rank, and of this rank's host, in GiB."""
        own = {"resident_max_gb": memory_in_use.resident_gb()} | memory_in_use.gpu_peaks()
        maxima = self.layout.all_reduce(torch.tensor(list(own.values()), dtype=torch.float64), "max").tolist()
        fullest = {f"memory/{name}": value for name, value in zip(own, maxima, strict=True)}
        here = {"memory_gb": device.memory_gb(), "memory/resident_gb": own["resident_max_gb"]}
        return here | fullest | {"memory/host_gb": memory_in_use.host_used_gb()}


def make_speed(policy: MegatronPolicy, rollout: RolloutSection, peak_tflops: float | None, frozen: bool) -> Speed:
    """Return the trainer's speed. Its peak is `run.peak_tflops`, else a known GPU's BF16 value from its data sheet."""
    alone = rollout.placed == "colocated" or not device.has_gpu()
    num_devices = policy.layout.world_size + (0 if alone else rollout.server_gpus)
    if peak_tflops is None and device.has_gpu() and policy.dtype == torch.bfloat16:
        peak_tflops = bf16_tflops_of(device.name())
    peak = None if peak_tflops is None else peak_tflops * 1e12
    return Speed(policy.layout, policy.hf_config, num_devices, peak, frozen, rollout.max_staleness > 0)
