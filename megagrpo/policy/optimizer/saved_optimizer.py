"""The optimizer's state in a checkpoint: a resumed run takes options from its config, and absent parts are dropped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from megagrpo.config import TrainSection


def follow_config(saved: Any, train: TrainSection) -> None:
    """Overwrite the options in a saved optimizer state with this run's config. Megatron would look up a group by its
    learning rates, which may have changed, and keep its betas.

    Groups share one `betas`, and their keys are interned, as in a fresh optimizer. pickle writes a shared object once,
    so a resumed run saves the same bytes as an uninterrupted run.
    """
    options = {
        "max_lr": train.learning_rate,
        "min_lr": train.min_learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_epsilon,
        "momentum": train.muon_momentum,
    }
    if train.own_optimizer:
        options = {name: options[name] for name in ("max_lr", "min_lr")} | train.optimizer_args
    for group in _groups(saved):
        values = group | {name: value for name, value in options.items() if group.get(name) is not None}
        group.clear()
        group |= {sys.intern(name): value for name, value in values.items()}


def _groups(saved: Any) -> Iterator[dict[str, Any]]:
    """Yield every parameter group of a saved optimizer state, which may hold the states of several optimizers."""
    if isinstance(saved, dict):
        yield from saved.get("param_groups", ())
        saved = list(saved.values())
    if isinstance(saved, list):
        for part in saved:
            yield from _groups(part)


def drop_absent(optimizer: dict[Any, Any]) -> None:
    """Remove states gathered by another rank: None here, which Megatron's checkpoints treat as shared by all ranks."""
    for part in [optimizer, *(part for part in optimizer.values() if isinstance(part, dict))]:
        if part.get("param_state", part) is None:
            del part["param_state"]
