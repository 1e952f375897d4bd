"""Current scaling: an operand's FP8 scales follow from its largest magnitudes. All recipes but `delayed` use it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.policy.fp8.fp8_settings import Fp8
from megagrpo.policy.fp8.rounding import E4M3, round_to
from megagrpo.policy.fp8.tensor import Fp8Tensor


@dataclass(frozen=True)
class CurrentScaling:
    """Rounds the operands of a linear's products, each by scales of the current tensor."""

    fp8: Fp8

    def operands(self, x: Tensor, weight: Tensor) -> CurrentScaling:
        """Return how a linear rounds x [..., in] and its weight [out, in]. Here that does not depend on them."""
        return self

    def input(self, x: Tensor, dim: int) -> Tensor:
        """Return x [rows, width] rounded to e4m3, float32."""
        return self.round(x, E4M3, dim)

    def weight(self, weight: Tensor, dim: int) -> Tensor:
        """Return the weight [rows, width] rounded to e4m3, float32; the stored values if it is an Fp8Tensor."""
        return weight.values() if isinstance(weight, Fp8Tensor) else self.round(weight, E4M3, dim, square=True)

    def gradient(self, grad: Tensor, dim: int) -> Tensor:
        """Return the gradient [rows, width] rounded to the settings' dtype of gradients, float32."""
        return self.round(grad, self.fp8.gradients, dim)

    def round(self, x: Tensor, dtype: torch.dtype, dim: int, square: bool = False) -> Tensor:
        """Round x [rows, width] for a product that sums over `dim`; return float32. `square` is as in `Fp8.tile`."""
        return round_to(x, dtype, self.fp8.tile(x.shape, dim, square), power_of_two=self.fp8.powers_of_two)
