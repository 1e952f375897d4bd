"""AdamW whose moments take less room: in bfloat16, in 8 bits or in the host's memory, and in float32 on the device only inside a step.

Moments are rounded at random, up or down in proportion: to the nearest, a beta2 near 1 would change a stored moment by less than its last
bit, and it would never decay. The random numbers depend on the step alone, so a resumed run draws the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megagrpo.device.adam import FusedAdam

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
BLOCK_SIZE = 256  # elements that share a power of two as scale
MOMENTS = ("exp_avg", "exp_avg_sq")


class CompactAdam(FusedAdam):
    """`FusedAdam` that keeps its moments as `dtype`: float32, bfloat16 or float8_e4m3fn, on the CPU with `offload`.

    In 8 bits a moment is a value of e4m3 times the scale of its block; of the second moment it is the root, which has half the range.
    """

    def __init__(self, params, *, dtype: torch.dtype, offload: bool, **settings):
        super().__init__(params, **settings)
        self._dtype, self._offload = dtype, offload

    def _step_group(self, group: dict, params: list[Tensor]) -> None:
        for p in params:  # one at a time: only its moments are float32, and on the device
            self.state[p] = {name: self.dense_moment(p, name) for name in MOMENTS if name in self.state[p]}
            super()._step_group(group, [p])
            self._compact(p, group["step"])

    @torch.no_grad()
    def dense_moments(self) -> None:
        """Have all moments in float32 as `state[p]["exp_avg"]` and `state[p]["exp_avg_sq"]`, as checkpoints read and write them."""
        for p in self._stored():
            self.state[p] = {name: self.dense_moment(p, name) for name in MOMENTS}

    @torch.no_grad()
    def compact_moments(self) -> None:
        """Put them back. What `dense_moments` gave is stored without loss."""
        for p in self._stored():
            self._compact(p, 0)

    def _stored(self) -> list[Tensor]:
        return [p for p, state in self.state.items() if state]  # asking for another would make an entry for it

    def dense_moment(self, p: Tensor, name: str) -> Tensor:
        """The moment `name` of `p`, float32, on its device."""
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
    """(e4m3 [blocks, 256], scale [blocks]) whose product is `values`, rounded at random; the last block is filled up with zeros."""
    flat = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
    scale = torch.exp2(torch.ceil(torch.log2(flat.abs().amax(1).clamp(min=1e-30) / FP8_MAX)))
    scaled = flat / scale[:, None]  # exact: a power of two
    normal = round_mantissa(scaled, 20, generator)
    # Below 2^-6 e4m3 has a fixed step of 2^-9.
    noise = torch.rand(scaled.shape, generator=generator, device=scaled.device)
    small = torch.floor(scaled.abs() * 512 + noise).clamp(max=8) / 512 * scaled.sign()
    return torch.where(scaled.abs() < 2**-6, small, normal).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def round_mantissa(values: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Float32 `values` with the last `bits` bits of the mantissa zero: each goes up or down at random so that the mean is the value."""
    noise = torch.randint(0, 2**bits, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    return ((values.contiguous().view(torch.int32) + noise) & -(2**bits)).view(torch.float32)
