"""AdamW whose moments take less memory: bfloat16, 8 bits or host memory. Inside a step they are float32 on the device.

Moments are rounded stochastically, up or down in proportion. With rounding to nearest and a beta2 near 1, a step would
change a stored moment by less than its last bit, and the moment would never decay. The random numbers depend on the
step alone, so a resumed run draws the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megagrpo.platform import device
from megagrpo.platform.device.adam import FusedAdam
from megagrpo.platform.device.host_copies import HostPieces

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
MOMENT_BLOCK_SIZE = 256  # elements that share a scale, a power of two
MOMENTS = ("exp_avg", "exp_avg_sq")


class CompactAdam(FusedAdam):
    """A `FusedAdam` that keeps its moments as `dtype`: float32, bfloat16 or float8_e4m3fn, on the CPU with `offload`.

    In 8 bits a moment is e4m3 times its block's scale. The second moment's square root is stored, with half the range.
    """

    def __init__(self, params: ParamsT, *, dtype: torch.dtype, offload: bool, **settings: Any):
        super().__init__(params, **settings)
        self._dtype, self._offload, self._host = dtype, offload, HostPieces()

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = self._storage(p)
            generator = torch.Generator(p.device).manual_seed(group["step"])
            for part in _parts(p):  # one at a time: only this part's moments are float32 and on the device
                moments = [self._read(p, name, part) for name in MOMENTS]
                assert p.grad is not None, "the caller selects parameters with a gradient"
                self._update(group, [p.view(-1)[part]], [p.grad.view(-1)[part]], [[moment] for moment in moments])
                for name, values in zip(MOMENTS, moments, strict=True):
                    self._write(p, name, part, values, generator)

    @torch.no_grad()
    def dense_moments(self) -> None:
        """Convert all moments to float32 in `state[p]["exp_avg"]` and `state[p]["exp_avg_sq"]`, as in checkpoints."""
        for p in self._stored():
            self.state[p] = {name: self.dense_moment(p, name) for name in MOMENTS}

    @torch.no_grad()
    def compact_moments(self) -> None:
        """Convert all moments back to the compact form. Moments from `dense_moments` are stored without loss."""
        for p in self._stored():
            if self._dtype == torch.float32:
                self.state[p] = {name: self._placed(p, moment) for name, moment in self.state[p].items()}
                continue
            dense, self.state[p] = self.state[p], self._storage(p)
            generator = torch.Generator(p.device).manual_seed(0)
            for part in _parts(p):
                for name in MOMENTS:
                    self._write(p, name, part, dense[name].view(-1)[part].to(p.device), generator)

    def _stored(self) -> list[Tensor]:
        # state is a defaultdict: looking up another key would create it
        return [p for p, state in self.state.items() if state]

    def dense_moment(self, p: Tensor, name: str) -> Tensor:
        """Return the moment `name` of `p`, float32 in the shape of `p`, where the moments are stored. A stored float32
        moment is returned itself."""
        if self._dtype == torch.float32:
            return self.state[p][name]
        values = torch.empty(p.shape, dtype=torch.float32, device=self._where(p))
        for part in _parts(p):
            values.view(-1)[part] = self._read(p, name, part)
        return values

    def _storage(self, p: Tensor) -> dict[str, Tensor]:
        """Return the compact form of two moments of zeros."""
        zeros = self._host.zeros if self._offload else partial(torch.zeros, device=p.device)
        if self._dtype != FP8:
            return {name: zeros(p.shape, dtype=self._dtype) for name in MOMENTS}
        blocks = -(-p.numel() // MOMENT_BLOCK_SIZE)
        values = {name: zeros((blocks, MOMENT_BLOCK_SIZE), dtype=FP8) for name in MOMENTS}
        return values | {f"{name}_scale": zeros((blocks,), dtype=torch.float32) for name in MOMENTS}

    def _placed(self, p: Tensor, moment: Tensor) -> Tensor:
        """Return a float32 moment where it is stored. Those of a checkpoint are copied there."""
        if not self._offload:
            return moment.to(p.device)
        stays = moment.device.type == "cpu" and moment.is_pinned() == device.has_gpu()
        return moment if stays else self._host.zeros(p.shape, moment.dtype).copy_(moment)

    def _where(self, p: Tensor) -> torch.device:
        return torch.device("cpu") if self._offload else p.device

    def _read(self, p: Tensor, name: str, part: slice) -> Tensor:
        """Return elements `part` of the moment `name` of the flattened `p`, float32 on its device."""
        stored = self.state[p][name]
        if stored.dtype != FP8:
            return stored.view(-1)[part].to(p.device, non_blocking=True).float()
        blocks = _blocks(part)
        scale = self.state[p][f"{name}_scale"][blocks].to(p.device)
        values = (stored[blocks].to(p.device, non_blocking=True).float() * scale[:, None]).flatten()[
            : part.stop - part.start
        ]
        return values.square() if name == "exp_avg_sq" else values

    def _write(self, p: Tensor, name: str, part: slice, values: Tensor, generator: torch.Generator) -> None:
        """Store float32 `values` as elements `part` of the moment `name` of the flattened `p`."""
        stored = self.state[p][name]
        if self._dtype == FP8:
            blocks = _blocks(part)
            stored[blocks], self.state[p][f"{name}_scale"][blocks] = to_fp8(
                values.sqrt() if name == "exp_avg_sq" else values, generator
            )
        else:
            stored.view(-1)[part] = round_mantissa(values, 16, generator) if self._dtype == torch.bfloat16 else values


def _parts(p: Tensor) -> Iterator[slice]:
    """Yield consecutive slices of the flattened `p`, of the device's preferred size for elementwise operations: whole
    blocks, except for the last."""
    size = device.block_elements()
    for start in range(0, p.numel(), size):
        yield slice(start, min(start + size, p.numel()))


def _blocks(part: slice) -> slice:
    """Return the blocks that hold elements `part`."""
    return slice(part.start // MOMENT_BLOCK_SIZE, -(-part.stop // MOMENT_BLOCK_SIZE))


def to_fp8(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (e4m3 [blocks, 256], float32 scale [blocks]) whose product is `values` float32, rounded stochastically.

    The last block is padded with zeros.
    """
    flat = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % MOMENT_BLOCK_SIZE)).view(
        -1, MOMENT_BLOCK_SIZE
    )
    scale = torch.exp2(torch.ceil(torch.log2(flat.abs().amax(1).clamp(min=1e-30) / FP8_MAX)))
    scaled = flat / scale[:, None]  # exact: a power of two
    magnitude = scaled.abs()
    shift = (magnitude < 2**-6) * 2**-6  # below 2^-6 e4m3 has the step of numbers from 2^-6 to 2^-5
    rounded = round_mantissa(magnitude.add_(shift), 20, generator).sub_(shift).clamp_(max=FP8_MAX)
    return rounded.copysign_(scaled).to(FP8), scale


def round_mantissa(values: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Zero the last `bits` bits of the mantissa of float32 `values`, rounding up or down at random so that the mean is
    the value. Same shape and dtype."""
    # a draw of 64 bits costs as much as one of 32
    pairs = torch.empty(-(-values.numel() // 2), dtype=torch.int64, device=values.device)
    noise = pairs.random_(-(2**63), None, generator=generator).view(torch.int32)[: values.numel()].view(values.shape)
    noise = noise.bitwise_and_(2**bits - 1)
    return noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(-(2**bits)).view(torch.float32)
