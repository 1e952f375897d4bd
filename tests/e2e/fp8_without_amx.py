"""A worker extension (`--worker-extension-cls`) for FP8 blocks on a CPU without AMX. vLLM offers its kernels for them on
CPUs with AMX only, but they run with AVX-512 too."""

from __future__ import annotations

import hashlib

import torch
from halting import Halting
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8

CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)


class Workers(Halting):
    """Workers that run FP8 blocks."""

    def parameters(self) -> dict[str, tuple[str, list[int], str]]:
        """Return name -> dtype, shape and SHA-256 of all parameters of this worker's model, as its kernels read
        them."""
        held = {name: parameter.detach().contiguous() for name, parameter in self.model_runner.model.named_parameters()}
        return {
            name: (str(x.dtype), list(x.shape), hashlib.sha256(x.view(torch.uint8).numpy().tobytes()).hexdigest())
            for name, x in held.items()
        }
