"""Allowed distances from float64, by the run's precision. Imports nothing slow: `megagrpo audit --help` prints them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerances:
    """Allowed distances of a run from float64.

    `token` and `average` apply to log-probs, entropy and exact KL, of one token and on average over tokens, in nats.
    `loss` is relative to the tokens' mean absolute loss. `grad_norm` is relative. `gradient` is relative in the
    Euclidean norm of one tensor.
    """

    token: float
    average: float
    loss: float
    grad_norm: float
    gradient: float


TOLERANCES = {
    "float32": Tolerances(token=2e-4, average=2e-5, loss=2e-5, grad_norm=1e-4, gradient=2e-3),
    "float16": Tolerances(token=0.1, average=0.015, loss=0.003, grad_norm=0.01, gradient=0.1),
    "bfloat16": Tolerances(token=0.5, average=0.1, loss=0.02, grad_norm=0.05, gradient=0.5),
}
