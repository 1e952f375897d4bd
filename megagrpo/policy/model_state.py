"""A model chunk's state in checkpoints. The keys are the same for Transformer Engine's layers and local layers, so
either reads the other's files."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.utils import unwrap_model
from torch import nn

from megagrpo.policy.fp8.masters import store_unrounded
from megagrpo.policy.fp8.tensor import dense, is_fp8
from megagrpo.policy.lora.lora_layers import is_added

# key of a layer's state besides weights; with several experts in one layer the expert's number follows
EXTRA_STATE = "_extra_state"


def sharded_state(chunk: nn.Module, metadata: dict[str, Any], adapters_only: bool = False) -> dict[str, Any]:
    """Return Megatron's sharded state of `chunk`, without extra states; with `adapters_only` without the base model's
    weights.

    The extra state of Megatron's linears is None, and that of Transformer Engine's layers is empty.
    """
    return {
        name: entry
        for name, entry in unwrap_model(chunk).sharded_state_dict(metadata=metadata).items()
        if not name.rpartition(".")[2].startswith(EXTRA_STATE) and (is_added(name) or not adapters_only)
    }


def dense_state(state: dict[str, Any]) -> dict[str, Any]:
    """Replace the FP8 weights in a chunk's `state` by dense copies in host memory. Checkpoints hold the dense form."""
    for entry in state.values():
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and is_fp8(entry.data):
            entry.data = dense(entry.data).cpu()
    return state


def prefix_keys(state: dict[str, Any], prefix: str) -> None:
    """Put `prefix` before the keys of all tensors in a sharded state, so that a checkpoint can hold two models."""
    add_prefix_for_sharding(state, prefix)


def load_state(chunk: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
    """Load `dense_state` into `chunk` after a checkpoint filled it. Layers without extra state in it keep theirs."""
    model = unwrap_model(chunk)
    without = {name: None for name in model.state_dict() if name.endswith(EXTRA_STATE)}
    model.load_state_dict(without | state, strict=strict)
    for name, weight in model.named_parameters():
        if is_fp8(weight) and name in state:
            store_unrounded(weight, state[name])
