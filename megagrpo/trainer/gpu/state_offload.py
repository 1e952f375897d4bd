"""Moves the trainer's state between the GPU and host memory. `gpu_sharing` decides when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import megagrpo.platform.device as device
from megagrpo.platform.device.tensor_offload import OffloadedStorages, storages
from megagrpo.platform.parallel.agree import run_own_and_agree
from megagrpo.policy.fp8.tensor import parts
from megagrpo.policy.lora.quantized_base import StoredWeight
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.optimizer.policy_optimizer import parts_of
from megagrpo.policy.reference import Reference
from megagrpo.policy.teacher import Teacher


class NoOffload:
    """Keeps all trainer state on its device (the default)."""

    away = False  # whether any state is off the device

    def load_all(self) -> None: ...

    def load_weights_only(self) -> None: ...

    def offload_all(self) -> None: ...


class Offload:
    """Moves trainer state between the GPU and host memory, so that a server can use the GPU's memory.

    Gradients are freed, since a step begins with zero gradients. Master weights, optimizer moments, reference, teachers
    and finally the weights move to host memory. Tensors keep their identity and their exact bits. The methods may be
    called in any order. All are collective: a method returns when all ranks are done. Frozen weights, teachers, and a
    reference that has not changed since, are copied to the host only once.
    """

    def __init__(
        self,
        policy: MegatronPolicy,
        reference: Reference | None = None,
        teachers: Sequence[Teacher] = (),
        critic: MegatronPolicy | None = None,
    ):
        self._policy = policy
        self._critic = Offload(critic) if critic is not None else None
        self._others = [(one, OffloadedStorages()) for one in (reference, *teachers) if one is not None]
        self._weights, self._state = OffloadedStorages(), OffloadedStorages()
        self._frozen = OffloadedStorages()
        self._parts = self._weights, self._frozen, self._state, *(storages for _, storages in self._others)

    @property
    def away(self) -> bool:
        """Whether any state is off the GPU."""
        return not all(part.is_empty for part in self._all_parts())

    @property
    def host_bytes(self) -> int:
        """Bytes of this rank's state in host memory, including the copies of frozen weights that are kept there."""
        return sum(part.used for part in self._all_parts())

    def load_all(self) -> None:
        """Move all state back to the GPU; gradients are zero."""
        run_own_and_agree(self._policy.layout, lambda: [part.bring_back() for part in self._all_parts()])

    def load_weights_only(self) -> None:
        """Move everything but the policy's weights to host memory, and the weights back to the GPU."""
        run_own_and_agree(self._policy.layout, self._move_state)

    def offload_all(self) -> None:
        """Move all state to host memory."""
        run_own_and_agree(self._policy.layout, self._move_all)

    def _all_parts(self) -> tuple[OffloadedStorages, ...]:
        return self._parts if self._critic is None else self._parts + self._critic._parts

    def _move_state(self) -> None:
        if self._critic is not None:  # its weights are not sent to servers
            self._critic._move_all()
        self._weights.bring_back()
        self._frozen.bring_back()
        of_weights = storages(self._of_weights())
        self._state.drop(self._gradients())
        self._state.move(t for t in self._of_state() if t.untyped_storage()._cdata not in of_weights)
        for model, moved in self._others:
            moved.move([part for weight in model.weights for part in parts(weight)], version=model.times_moved)
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
        """Frozen weights: the subset of `_of_weights` that no step changes."""
        for chunk in self._policy.chunks:
            yield from (p for p in chunk.parameters() if not p.requires_grad)
            for module in chunk.modules():
                if isinstance(module, StoredWeight):
                    yield from module.buffers()

    def _of_weights(self) -> Iterator[Tensor]:
        """All parameters (also frozen), sharded ones' all-gather buffers, and the storage of `model.base_storage`."""
        for chunk in self._policy.model:
            yield from (part for weight in chunk.module.parameters() for part in parts(weight))
            yield from chunk.module.buffers()
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                if buffer.param_data is not None:
                    yield buffer.param_data

    def _of_state(self) -> Iterator[Tensor]:
        """Master weights and moments. With float32 weights the masters are the weights themselves."""
        for part in parts_of(self._policy.optimizer):
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value))

    def _forget_rounded_weights(self) -> None:
        """Drop the FP8 weights that Transformer Engine caches between micro-batches; a module whose cache is missing
        quantizes its weights again."""
        for chunk in self._policy.chunks:
            for module in chunk.modules():
                getattr(module, "_fp8_workspaces", {}).clear()
