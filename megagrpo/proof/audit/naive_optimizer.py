"""AdamW and the learning-rate schedule in float64, as in the papers and the config's descriptions."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from megagrpo.config import TrainSection
from megagrpo.proof.audit.saved import Sampled


def learning_rate(number: int, train: TrainSection, total: int) -> float:
    """Return the rate of optimizer step `number`, from 1: a linear warm-up, then constant, linear or cosine.

    Step `total` + 1, after the last, would have the rate `min_learning_rate`.
    """
    warmup = train.warmup(total)
    if number <= warmup:
        return train.learning_rate * number / warmup
    gone = min(1.0, (number - warmup) / (total + 1 - warmup))
    left = {"constant": 1.0, "linear": 1 - gone, "cosine": (1 + math.cos(math.pi * gone)) / 2}[train.lr_scheduler_type]
    low = train.learning_rate if train.lr_scheduler_type == "constant" else train.min_learning_rate
    return low + (train.learning_rate - low) * left


def clip_factor(grad_norm: float, train: TrainSection) -> float:
    """Return the factor on every gradient that limits the global norm to `max_grad_norm`."""
    return min(1.0, train.max_grad_norm / grad_norm) if train.max_grad_norm and grad_norm else 1.0


def is_decayed(name: str, dims: int) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases."""
    return dims > 1 and not name.endswith("bias")


def sizes(before: Sampled) -> Sampled:
    """Return `before` with absolute summands. Moments and movements from it are the scale of their rounding errors."""
    return replace(before, weight=before.weight.abs(), first=before.first.abs(), gradient=before.gradient.abs())


def moments(before: Sampled, train: TrainSection) -> tuple[Tensor, Tensor]:
    """Return Adam's two moments [n] after the step with gradient `before.gradient`."""
    first = train.adam_beta1 * before.first + (1 - train.adam_beta1) * before.gradient
    second = train.adam_beta2 * before.second + (1 - train.adam_beta2) * before.gradient**2
    return first, second


def movement(before: Sampled, number: int, decayed: bool, train: TrainSection, total: int) -> Tensor:
    """Return [n]: the change that AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) makes to the weights in
    optimizer step `number`, from 1."""
    first, second = moments(before, train)
    mean, square = first / (1 - train.adam_beta1**number), second / (1 - train.adam_beta2**number)
    decay = train.weight_decay * before.weight if decayed else 0.0
    return -learning_rate(number, train, total) * (mean / (square.sqrt() + train.adam_epsilon) + decay)
