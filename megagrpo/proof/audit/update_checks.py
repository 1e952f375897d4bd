"""Checks the step after the gradient against float64: learning rate, clipped gradient, Adam's update and moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter

import torch
from torch import Tensor

from megagrpo.config import TrainSection
from megagrpo.proof.audit.audit_compare import NO_TOLERANCE, ROUNDING_TOLERANCE, Check, compare
from megagrpo.proof.audit.recompute import Recomputed
from megagrpo.proof.audit.saved import DumpedUpdate, Sampled, Step, following
from megagrpo.proof.audit.tolerances import TOLERANCES

UPDATE = 1e-4  # tolerance relative to a weight's movement, which Adam computes in float32
FLOAT32_EPSILON = 2.0**-23  # tolerance relative to the weight that the movement is added to
TINY = 1e-30  # second moments below are denormal in float32
BACKGROUND = 1e-3  # a tensor with a gradient below this share of all tensors' is compared relative to theirs


def check_update(step: Step, update: DumpedUpdate, result: Recomputed) -> Iterator[Check]:
    """Yield the checks of one optimizer step, or one check that says why the update cannot be recomputed."""
    train, number = step.config.train, update.steps_before
    total = step.config.run.num_steps * step.config.algorithm.updates_per_step
    if "grad_norm" in update.metrics and number is not None and not train.own_schedule:
        rate = learning_rate(number + 1, train, total)
        yield compare("learning_rate", [update.metric("learning_rate")], [rate], ROUNDING_TOLERANCE, lambda _: "", 0.0)
    if reason := _not_recomputed(step, update):
        yield Check("weights after the update", 0, True, 0.0, 0.0, note=f"not recomputed: {reason}")
        return
    assert number is not None, "a dump with a sample of the optimizer counts the steps before"
    names = [name for name in update.optimizer if name in result.sampled]
    sampled = {name: update.optimizer[name] for name in names}

    def locate(index: int) -> str:
        for name, rows in sampled.items():
            if index < len(rows.places):
                return f"{name} element {int(rows.places[index])}"
            index -= len(rows.places)
        raise IndexError(index)

    def joined(columns: list[Tensor]) -> Tensor:
        return torch.cat(columns) if columns else torch.zeros(0)

    def column(name: str) -> Tensor:
        return joined([getattr(rows, name) for rows in sampled.values()])

    dtype = getattr(torch, step.dtype)
    weights = joined([result.sampled[name].weight for name in names])
    if left := sorted(set(update.optimizer) - set(names)):
        said = "no tensor of transformers' model"
        yield Check("weights in the optimizer", len(left), False, len(left), 0.0, left[0], said)
        return
    yield compare("weights in the optimizer", column("weight").to(dtype), weights, NO_TOLERANCE, locate)
    moved = [torch.zeros_like(rows.weight) for rows in sampled.values()]
    added = moved
    if "grad_norm" in update.metrics:
        yield _gradients(step, update, result, sampled)
        pairs = [(rows, is_decayed(name, result.sampled[name].dims)) for name, rows in sampled.items()]
        moved = [movement(rows, number + 1, decays, train, total) for rows, decays in pairs]
        absolute = [(sizes(rows), decays) for rows, decays in pairs]
        added = [movement(rows, number + 1, decays, train, total).abs() for rows, decays in absolute]
    expected = joined(moved)
    allowed = UPDATE * expected.abs() + ROUNDING_TOLERANCE * joined(added) + FLOAT32_EPSILON * column("weight").abs()
    moves = column("next_weight") - column("weight")
    yield compare("weights after the update", moves, expected, allowed, locate, note="as movements")
    yield from _chained(step, update, sampled, locate)


def _not_recomputed(step: Step, update: DumpedUpdate) -> str:
    if step.config.train.optimizer != "adam":
        return f"train.optimizer is {step.config.train.optimizer}"
    if step.config.train.own_schedule:
        return f"train.lr_scheduler_type is {step.config.train.lr_scheduler_type}"
    if step.config.model.fp8_param:
        return "model.fp8_param keeps weights in FP8"
    return "" if update.optimizer else "the dump holds no sample of the optimizer"


def _gradients(step: Step, update: DumpedUpdate, result: Recomputed, sampled: dict[str, Sampled]) -> Check:
    """Compare each tensor's sampled gradient: norm of the difference over norm of the recomputed gradient."""
    factor = clip_factor(result.grad_norm, step.config.train)
    expected = {name: factor * result.sampled[name].gradient for name in sampled}
    count = sum(g.numel() for g in expected.values())
    background = BACKGROUND * math.sqrt(sum(g.square().sum().item() for g in expected.values()) / max(count, 1))
    errors = []
    for name, rows in sampled.items():
        size = max(expected[name].norm().item(), background * math.sqrt(len(rows.places)))
        errors.append((rows.gradient - expected[name]).norm().item() / size if size else rows.gradient.norm().item())
    tolerance, names = TOLERANCES[step.dtype].gradient, list(sampled)
    zeros, remark = [0.0] * len(errors), "relative, by tensor"
    return compare("clipped gradient", errors, zeros, tolerance, names.__getitem__, note=remark)


def _chained(
    step: Step, update: DumpedUpdate, sampled: dict[str, Sampled], locate: Callable[[int], str]
) -> Iterator[Check]:
    """Check that the next dumped optimizer step started from the weights and moments that this one left."""
    later = following(step, update)
    if later is None or later.optimizer.keys() != update.optimizer.keys():
        return
    if later.steps_before is None or update.steps_before is None:
        return
    taken = "grad_norm" in update.metrics
    if later.steps_before != update.steps_before + taken:  # the run resumed from another checkpoint in between
        return

    def both(now: Callable[[Sampled], Tensor], then: Callable[[Sampled], Tensor]) -> tuple[Tensor, Tensor]:
        started = [then(later.optimizer[name]) for name in sampled]
        return torch.cat(started), torch.cat([now(rows) for rows in sampled.values()])

    dumped, expected = both(attrgetter("next_weight"), attrgetter("weight"))
    yield compare("weights of the next update", dumped, expected, NO_TOLERANCE, locate)
    if step.config.train.optimizer_state_dtype != "fp32":
        note = f"not compared: kept in {step.config.train.optimizer_state_dtype}, rounded at random"
        yield Check("moments of the next update", 0, True, 0.0, 0.0, note=note)
        return
    for index, name in enumerate(("first", "second")):

        def after(rows: Sampled, index: int = index, name: str = name) -> Tensor:
            return moments(rows, step.config.train)[index] if taken else getattr(rows, name)

        dumped, expected = both(after, attrgetter(name))
        added = torch.cat([after(sizes(rows)) for rows in sampled.values()])
        yield compare(f"{name} moment of the next update", dumped, expected, ROUNDING_TOLERANCE * added + TINY, locate)


# AdamW and the learning-rate schedule, as in the papers and the config's descriptions.
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
