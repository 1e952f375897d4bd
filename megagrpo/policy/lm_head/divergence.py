"""Divergences of two distributions, elementwise: KL in both directions, Jensen-Shannon, and KL to a mixture.

All are D = a KL(q || m) + b KL(p || m) with the policy p, the other model q and the mixture m = c q + (1 - c) p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Divergence:
    """The numbers a, b and c of one divergence."""

    of_other: float
    of_policy: float
    share: float

    @classmethod
    def of(cls, name: str, mix: float) -> Divergence:
        """Return the divergence `algorithm.teacher.divergence` with its `mix`. Raises ValueError for another name."""
        numbers = {
            "forward": (1.0, 0.0, 0.0),
            "reverse": (0.0, 1.0, 1.0),
            "jensen_shannon": (mix, 1 - mix, mix),
            "skewed_forward": (1.0, 0.0, mix),
            "skewed_reverse": (0.0, 1.0, 1 - mix),
        }
        if name not in numbers:
            raise ValueError(f"direction: {name!r} is not one of {', '.join(numbers)}")
        return cls(*numbers[name])

    @property
    def mixes(self) -> bool:
        """Whether the mixture differs from both distributions."""
        return 0 < self.share < 1

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Return (D, p dD/dp) of each outcome, in the shape of the log-probs of policy and other model.

        The sum of the first over all outcomes is the divergence. To the second a multiple of p may be added, because
        the gradient d D / d logits = s - p sum(s) does not change. It is chosen so that s is exactly 0 where p is q.
        """
        p, q, apart = log_p.exp(), log_q.exp(), log_q - log_p
        if self.share == 0:
            return self.of_other * q * apart, self.of_other * (p - q)
        if self.share == 1:
            value = -self.of_policy * p * apart
            return value, value
        # log(m / p), without overflow: the larger of p and q is factored out
        small = torch.log1p(self.share * torch.expm1(apart.clamp(max=0)))
        large = apart + torch.log1p((1 - self.share) * torch.expm1(-apart.clamp(min=0)))
        mixture_p = torch.where(apart > 0, large, small)
        mixture_q = mixture_p - apart  # log(m / q)
        value = -self.of_other * q * mixture_q - self.of_policy * p * mixture_p
        rest = 1 - self.share
        of_q = torch.expm1(-mixture_q) * (-self.of_other * rest)
        return value, p * (of_q - self.of_policy * (mixture_p + rest * torch.expm1(-mixture_p)))


def tail(log_of_rows: Tensor) -> Tensor:
    """Return [n, k + 1]: the log-probs [n, k], and the logarithm of the probability that they leave.

    Rounding may leave nothing or less, so that the tail has at least the dtype's smallest step below 1.
    """
    rest = 1 - log_of_rows.exp().sum(dim=-1, keepdim=True)
    return torch.cat((log_of_rows, rest.clamp(min=torch.finfo(rest.dtype).eps).log()), dim=-1)
