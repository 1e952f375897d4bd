"""AdamW whose moments take less memory: in bfloat16, in 8 bits or in host memory. They are float32 on the device only inside a step.

Moments are rounded stochastically, up or down in proportion. With rounding to nearest and a beta2 near 1, a step would change a stored
moment by less than its last bit, and the moment would never decay. The random numbers depend on the step alone, so a resumed run draws
the same.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megagrpo.device.adam import AdamSettings, FusedAdam

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
BLOCK_SIZE = 256  # elements that share a scale, a power of two
MOMENTS = ("exp_avg", "exp_avg_sq")


class CompactAdam(FusedAdam):
    """A `FusedAdam` that keeps its moments as `dtype`: float32, bfloat16 or float8_e4m3fn, on the CPU with `offload`.

    In 8 bits a moment is an e4m3 value times its block's scale. The second moment is stored as its square root, which has half the
    range.
    """

    def __init__(self, params: ParamsT, *, dtype: torch.dtype, offload: bool, **settings: Unpack[AdamSettings]):
        super().__init__(params, **settings)
        self._dtype, self._offload = dtype, offload

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:  # one at a time: only this parameter's moments are float32 and on the device
            self.state[p] = {name: self.dense_moment(p, name) for name in MOMENTS if name in self.state[p]}
            super()._step_group(group, [p])
            self._compact(p, group["step"])

    @torch.no_grad()
    def dense_moments(self) -> None:
        """Convert all moments to float32 in `state[p]["exp_avg"]` and `state[p]["exp_avg_sq"]`, as checkpoints read and write them."""
        for p in self._stored():
            self.state[p] = {name: self.dense_moment(p, name) for name in MOMENTS}

    @torch.no_grad()
    def compact_moments(self) -> None:
        """Convert all moments back to the compact form. Moments from `dense_moments` are stored without loss."""
        for p in self._stored():
            self._compact(p, 0)

    def _stored(self) -> list[Tensor]:
        return [p for p, state in self.state.items() if state]  # state is a defaultdict: looking up another key would create it

    def dense_moment(self, p: Tensor, name: str) -> Tensor:
        """Return the moment `name` of `p`, float32 in the shape and on the device of `p`."""
        stored = self.state[p][name].to(p.device, non_blocking=True)
        if stored.dtype != FP8:
            return stored.float()
        values = (stored.float() * self.state[p][f"{name}_scale"].to(p.device)[:, None]).flatten()[: p.numel()].view(p.shape)
        return values.square() if name == "exp_avg_sq" else values

    def _compact(self, p: Tensor, step: int) -> None:
        generator = torch.Generator(p.device).manual_seed(step)
        for name in MOMENTS:
            values, scale = self.state[p][name], None
            if self._dtype == FP8:
                values, scale = to_fp8(values.sqrt() if name == "exp_avg_sq" else values, generator)
            elif self._dtype == torch.bfloat16:
                values = round_mantissa(values, 16, generator).bfloat16()
            for key, tensor in ((name, values), (f"{name}_scale", scale)):
                if tensor is not None:
                    self.state[p][key] = tensor.cpu() if self._offload else tensor


def to_fp8(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (e4m3 [blocks, 256], float32 scale [blocks]) whose product is `values` float32, rounded stochastically.

    The last block is padded with zeros.
    """
    flat = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
    scale = torch.exp2(torch.ceil(torch.log2(flat.abs().amax(1).clamp(min=1e-30) / FP8_MAX)))
    scaled = flat / scale[:, None]  # exact: a power of two
    normal = round_mantissa(scaled, 20, generator)
    # Below 2^-6 e4m3 has a fixed step of 2^-9.
    noise = torch.rand(scaled.shape, generator=generator, device=scaled.device)
    small = torch.floor(scaled.abs() * 512 + noise).clamp(max=8) / 512 * scaled.sign()
    return torch.where(scaled.abs() < 2**-6, small, normal).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def round_mantissa(values: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Zero the last `bits` bits of the mantissa of float32 `values`, rounding up or down at random so that the mean is the value. Same
    shape and dtype."""
    noise = torch.randint(0, 2**bits, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    return ((values.contiguous().view(torch.int32) + noise) & -(2**bits)).view(torch.float32)
