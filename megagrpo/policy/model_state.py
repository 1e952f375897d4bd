"""A model's state in checkpoints: the same keys whichever layers wrote it, so that those of Transformer Engine read what others wrote, and
others what they wrote."""

from __future__ import annotations

from typing import Any

from torch import nn

from megagrpo.policy.fp8.weights import dense, is_fp8, remember

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # isort: skip  (after megagrpo.policy)
from megatron.core.utils import unwrap_model  # isort: skip

EXTRA = "_extra_state"  # of a layer: what is no weight. One of several experts' in one layer is followed by its number


def sharded_state(chunk: nn.Module, metadata: dict[str, Any]) -> dict[str, Any]:
    """Megatron's sharded state of `chunk`, without extra states.

    Of Megatron's linears they are None; of Transformer Engine's layers no bytes, unless they scale by a history: pickles then, which it
    refuses to read. What is in these, `scale_state` has as tensors.
    """
    return {name: entry for name, entry in unwrap_model(chunk).sharded_state_dict(metadata=metadata).items() if not _is_extra(name)}


def dense_state(state: dict[str, Any]) -> dict[str, Any]:
    """`state` of a chunk, with dense copies in the host's memory in place of weights in FP8: what checkpoints hold."""
    for entry in state.values():
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and is_fp8(entry.data):
            entry.data = dense(entry.data).cpu()
    return state


def load_state(chunk: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
    """Take over what was loaded into `dense_state`. Layers whose extra state is not in it keep their own."""
    model = unwrap_model(chunk)
    without = {name: None for name in model.state_dict() if name.endswith(EXTRA)}
    model.load_state_dict(without | state, strict=strict)
    for name, weight in model.named_parameters():
        if is_fp8(weight) and name in state:
            remember(weight, state[name])


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2].startswith(EXTRA)
