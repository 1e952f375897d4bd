"""The state of a trained model in a checkpoint: weights, optimizer, learning-rate schedule and loss scale."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from megagrpo.config import TrainSection
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.model_state import dense_state, load_state, sharded_state
from megagrpo.policy.optimizer.policy_optimizer import parts_of


def trained_state(policy: MegatronPolicy, metadata: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """Return the sharded state of `policy` with Megatron's `metadata`. Collective."""
    # with LoRA only the adapters, as the run starts from the base model
    adapters_only, names = policy.config.lora.enabled, _chunk_names(policy)
    state: dict[str, Any] = {
        name: sharded_state(chunk, metadata, adapters_only) for name, chunk in zip(names, policy.chunks, strict=True)
    }
    # a run that stops while only its critic learns has no moments yet: Megatron makes the ones that a load fills
    makes = is_loading or not any(part.optimizer.state for part in parts_of(policy.optimizer))
    state["optimizer"] = policy.optimizer.sharded_state_dict(state, is_loading=makes, metadata=metadata)
    drop_absent(state["optimizer"])
    # only now: the optimizer identifies parameters by object identity
    state |= {name: dense_state(state[name]) for name in names}
    state["scheduler"] = policy.scheduler.state_dict()
    state |= {"loss_scale": scale} if (scale := policy.loss_scale.state_dict()) else {}
    return state


def load_trained(policy: MegatronPolicy, loaded: dict[str, Any]) -> None:
    """Load `trained_state` after a checkpoint filled it."""
    for name, chunk in zip(_chunk_names(policy), policy.chunks, strict=True):
        load_state(chunk, loaded[name], strict=not policy.config.lora.enabled)
    follow_config(loaded["optimizer"], policy.config.train)
    policy.optimizer.load_state_dict(loaded["optimizer"])
    policy.scheduler.load_state_dict(loaded["scheduler"])
    policy.loss_scale.load_state_dict(loaded.get("loss_scale", {}))


def _chunk_names(policy: MegatronPolicy) -> list[str]:
    count = len(policy.chunks)
    return ["model"] if count == 1 else [f"model{i}" for i in range(count)]


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
