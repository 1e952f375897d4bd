"""What a trainer that shares its GPU with a server leaves on it, by what comes next: a step, a weight sync, or responses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import megagrpo.device as device
from megagrpo.device.offload import Away, storages
from megagrpo.parallel.agree import own_part
from megagrpo.policy.fp8.weights import parts
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.optimizer import parts_of
from megagrpo.policy.reference import Reference
from megagrpo.policy.stored import StoredWeight


class Offload:
    """A trainer that gives its memory to servers: gradients are freed, for a step begins with new ones; masters, moments, the reference and
    then the weights wait in the host's memory. Tensors are the same ones before and after, bit by bit. Each verb may follow each other one,
    and is collective: when it returns all ranks have done it. What is frozen, and a reference that has not moved meanwhile, is copied to
    the host once.
    """

    def __init__(self, policy: MegatronPolicy, reference: Reference | None = None):
        self._policy, self._reference = policy, reference
        self._weights, self._state = Away(), Away()
        self._frozen, self._reference_weights = Away(), Away()
        self._parts = self._weights, self._frozen, self._state, self._reference_weights

    @property
    def away(self) -> bool:
        """Whether anything is not on the device."""
        return not all(part.is_empty for part in self._parts)

    @property
    def host_bytes(self) -> int:
        """What of this rank waits in the host's memory now, and what it still has there of what is copied once."""
        return sum(part.used for part in self._parts)

    def keep_everything(self) -> None:
        """Bring back what is away; gradients are zero."""
        own_part(self._policy.layout, self._bring_back)

    def keep_weights(self) -> None:
        """Move away everything but the policy's weights, and bring these back."""
        own_part(self._policy.layout, self._move_state)

    def keep_nothing(self) -> None:
        """Move away everything."""
        own_part(self._policy.layout, self._move_all)

    def _bring_back(self) -> None:
        for part in self._parts:
            part.bring_back()

    def _move_state(self) -> None:
        self._weights.bring_back()
        self._frozen.bring_back()
        of_weights = storages(self._of_weights())
        self._state.drop(self._gradients())
        self._state.move(t for t in self._of_state() if t.untyped_storage()._cdata not in of_weights)
        if self._reference is not None:
            of_reference = [part for weight in self._reference.weights for part in parts(weight)]
            self._reference_weights.move(of_reference, version=self._reference.times_moved)
        self._forget_rounded_weights()
        device.release_memory()

    def _move_all(self) -> None:
        self._move_state()
        self._frozen.move(self._of_frozen(), version=self._policy.times_filled)
        self._weights.move(t for t in self._of_weights() if not self._frozen.has(t))
        device.release_memory()

    def _gradients(self) -> Iterator[Tensor]:
        for chunk in self._policy.model:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                yield buffer.grad_data

    def _of_frozen(self) -> Iterator[Tensor]:
        """Of `_of_weights` what no step changes."""
        for chunk in self._policy.chunks:
            yield from (p for p in chunk.parameters() if not p.requires_grad)
            for module in chunk.modules():
                if isinstance(module, StoredWeight):
                    yield from module.buffers()

    def _of_weights(self) -> Iterator[Tensor]:
        """Parameters, frozen ones too, the buffers that those which are sharded are gathered in, and what `model.base_storage` keeps."""
        for chunk in self._policy.model:
            yield from (part for weight in chunk.module.parameters() for part in parts(weight))
            yield from chunk.module.buffers()
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                if buffer.param_data is not None:
                    yield buffer.param_data

    def _of_state(self) -> Iterator[Tensor]:
        """Masters, which are the weights themselves where these are float32, and moments."""
        for part in parts_of(self._policy.optimizer):
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value))

    def _forget_rounded_weights(self) -> None:
        """What Transformer Engine keeps of weights in FP8 from one micro-batch to the next; a module that misses its own makes it anew."""
        for chunk in self._policy.chunks:
            for module in chunk.modules():
                getattr(module, "_fp8_workspaces", {}).clear()
