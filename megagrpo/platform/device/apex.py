"""NVIDIA's apex, where `device.has_apex()`: megatron-core takes its FusedAdam, and our layers its RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor


def computes_on_cpu() -> bool:
    """Whether the installed apex computes without a GPU: it tries a step of its Adam. NVIDIA's own builds do not."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    try:
        from apex.optimizers import FusedAdam

        FusedAdam([parameter]).step()
    except Exception:  # of an import, of CUDA, or of a kernel
        return False
    return True


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight [..., H] for x [..., H], weight [H] of one dtype, by apex's kernel."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    normed: Tensor = fused_rms_norm_affine(x, weight, weight.shape, eps)
    return normed
