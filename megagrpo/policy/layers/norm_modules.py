"""RMSNorm, and modules of Megatron that normalise their output."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megagrpo.platform import device
from megagrpo.platform.device import apex
from megagrpo.policy.layers.elementwise import rms_norm


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467). If
    `centred`, the factor is 1 + weight; None: as Megatron's configuration says."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, centred: bool | None = None, **_: Any
    ):
        super().__init__()
        self.eps, self.centred = eps, config.layernorm_zero_centered_gamma if centred is None else centred
        start = torch.zeros if self.centred else torch.ones
        self.weight = torch.nn.Parameter(
            start(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # finalize_model_grads sums this gradient over the tensor-parallel ranks, each of which sees a part of the
        # sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed x [..., H] in x's dtype."""
        if not self.centred:
            norm = apex.rms_norm if device.has_apex() and x.dtype == self.weight.dtype else rms_norm
            return norm(x, self.weight, self.eps)
        wide = torch.promote_types(self.weight.dtype, torch.float32)  # bfloat16 is too coarse near 1 for 1 + weight
        return rms_norm(x, 1 + self.weight.to(wide), self.eps)


@functools.cache
def post_normed(base: Any, norm: type) -> Any:
    """Return a subclass of `base`, Megatron's attention or MLP, that normalises its output."""

    class PostNormed(base):
        def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
            super().__init__(config, *args, **kwargs)
            self.post_norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

        def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            """Return (normed output [T, 1, H], bias)."""
            output, bias = super().forward(*args, **kwargs)
            return self.post_norm(output), bias

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
        ) -> dict[str, Any]:
            """Return the state for a checkpoint. Megatron's MLP takes every tensor-parallel rank's norm for the first
            copy, so that all of them would be written."""
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            norm, groups = self.post_norm.state_dict(keep_vars=True), dict(tp_group=self.tp_group)
            groups |= dict(dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"])
            return state | make_sharded_tensors_for_checkpoint(
                norm, f"{prefix}post_norm.", {}, sharded_offsets, **groups
            )

    return PostNormed
