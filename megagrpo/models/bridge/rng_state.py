"""The state of a rank's random number generators, as an entry of a distributed checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megagrpo.platform.parallel.layout import Layout


def sharded_rng(layout: Layout) -> ShardedObject:
    """Return this rank's RNG state. Every rank saves its own: replicas' generators diverge as soon as one replica has
    more tokens."""
    state = [{"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}]
    return ShardedObject("rng", state, (layout.world_size,), (layout.world_rank,), replica_id=0)


def restore_rng(saved: list[dict[str, Any]]) -> None:
    """Set this process's generators to the contents of a loaded `sharded_rng`."""
    torch.set_rng_state(saved[0]["torch"])
    get_cuda_rng_tracker().set_states(saved[0]["tracker"])
