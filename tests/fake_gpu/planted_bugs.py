"""Bugs of code for GPUs, as patches: none of them shows on a CPU. `test_planted_bugs.py` plants them one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megagrpo import train_types
from megagrpo.platform.device.host_copies import HostCopies
from megagrpo.platform.device.tensor_offload import OffloadedStorages
from megagrpo.policy import megatron_policy
from megagrpo.policy.attention import causal
from megagrpo.policy.transformer import activation_offload
from megagrpo.sync.trainer_side import cuda_ipc
from megagrpo.sync.trainer_side import shared_buffers as slots
from tests.fake_gpu.kernels import host_view

Patch = pytest.MonkeyPatch


def a_mask_on_the_host(patch: Patch) -> None:
    """The attention's mask is built without a device."""
    stock = causal._short_bias
    patch.setattr(
        causal, "_short_bias", lambda length, window, dtype, device: stock(length, window, dtype, torch.device("cpu"))
    )


def micro_batches_on_the_host(patch: Patch) -> None:
    """Micro-batches are not moved to the device."""
    patch.setattr(train_types.MicroBatch, "to", lambda self, device: self)


def no_wait_for_copies(patch: Patch) -> None:
    """The backward pass reads activations before they are back."""
    patch.setattr(HostCopies, "wait", lambda self, event: None)


def copies_without_a_wait(patch: Patch) -> None:
    """Copies to the host do not wait for the work that computes their source."""

    def copy(self, sources, targets):
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    patch.setattr(HostCopies, "_copy", copy)


def activations_freed_early(patch: Patch) -> None:
    """A layer's activations are freed when their copy to the host starts."""
    stock = activation_offload.OffloadedLayer.offload

    def offload(self, excluded):
        stock(self, excluded)
        self._sources.clear()

    patch.setattr(activation_offload.OffloadedLayer, "offload", offload)


def a_wait_in_a_micro_batch(patch: Patch) -> None:
    """The loss of each micro-batch reads a number of the device."""
    stock = megatron_policy.MegatronPolicy._loss_inputs

    def loss_inputs(self, hidden, *args, **kwargs):
        assert float(hidden.detach().abs().max()) < 1e9
        return stock(self, hidden, *args, **kwargs)

    patch.setattr(megatron_policy.MegatronPolicy, "_loss_inputs", loss_inputs)


def log_probs_over_the_wrong_group(patch: Patch) -> None:
    """Tensor-parallel ranks sum over their data-parallel group."""
    from megatron.core import parallel_state

    stock = megatron_policy.vocab_logprobs

    def wrong(hidden, weight, task):
        return stock(hidden, weight, replace(task, group=parallel_state.get_data_parallel_group()))

    patch.setattr(megatron_policy, "vocab_logprobs", wrong)


def state_that_stays_away(patch: Patch) -> None:
    """The last storage of each part stays on the host."""

    def bring_back(self):
        last = self._storages.popitem() if self._storages else None
        stock(self)
        if last is not None:
            self._storages[last[0]] = last[1]

    stock = OffloadedStorages.bring_back
    patch.setattr(OffloadedStorages, "bring_back", bring_back)


def state_of_the_wrong_place(patch: Patch) -> None:
    """Storages come back, but from the start of the host's memory."""
    stock = OffloadedStorages.bring_back

    def bring_back(self):
        self._storages = {key: (storage, size, start and 0) for key, (storage, size, start) in self._storages.items()}
        stock(self)

    patch.setattr(OffloadedStorages, "bring_back", bring_back)


def an_unreleased_handle(patch: Patch) -> None:
    """After a failed sync no process counts down the handle of the server that died."""
    patch.setattr(cuda_ipc, "release", lambda handle: None)


def a_block_announced_early(patch: Patch) -> None:
    """The trainer announces a block without waiting for the copy into its memory."""
    patch.setattr(slots, "on_host", lambda sums: [host_view(total).item() % 2**64 for total in sums])
