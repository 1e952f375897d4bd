"""Weighs tasks in the loss. The weights keep the step's denominator, so that they move the loss from one task to
another and leave its scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def loss_weights(
    tasks: Sequence[str], counts: np.ndarray, factors: Mapping[str, float], by: str | None
) -> np.ndarray | None:
    """Return the weight [n] float64 of each trajectory of an optimizer step in the loss; None if all are 1.

    `tasks` [n] are their tasks, `counts` [n] their parts of the denominator D: loss tokens, or 1 each. A task with the
    part D_t of D and the factor f_t has the share of the loss that f_t D_t has of their sum; with `by` tasks that of
    f_t, with prompts that of f_t times its trajectories. Tasks without loss tokens have none. A trajectory's weight is
    its task's share over D_t / D.

    >>> loss_weights(["a", "a", "b"], np.array([2, 2, 4]), {"a": 3.0, "b": 1.0}, None).tolist()
    [1.5, 1.5, 0.5]
    >>> loss_weights(["a", "a", "b"], np.array([1, 1, 6]), {"a": 1.0, "b": 1.0}, "tasks").tolist()
    [2.0, 2.0, 0.6666666666666666]
    """
    if by is None and len({*factors.values()}) <= 1:
        return None
    names, owners = np.unique(np.asarray(tasks, dtype=object), return_inverse=True)
    parts = np.bincount(owners, counts, names.size)
    shares = np.array([factors[name] for name in names])
    if by is None:
        shares = shares * parts
    elif by == "prompts":
        shares = shares * np.bincount(owners, minlength=names.size)
    shares = np.where(parts > 0, shares, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.where(parts > 0, shares / shares.sum() * parts.sum() / parts, 0.0)
    return weights[owners]
