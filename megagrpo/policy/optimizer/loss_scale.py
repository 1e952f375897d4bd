"""The loss scale of fp16 training: it lifts small gradients above the smallest fp16 number, and is divided out after
the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from torch import Tensor

from megagrpo.train_types import Metric

FIRST_SCALE, LEAST_SCALE = 2.0**16, 1.0
GROWS_AFTER = 1000  # backward passes without an overflow


class LossScale:
    """Megatron's dynamic loss scale of an fp16 policy; always 1 in other precisions.

    The scale is a power of two, so a gradient without overflow or underflow has the same bits at any scale. A backward
    pass that overflows is computed again at half the scale: no optimizer step is left out.
    """

    def __init__(self, dtype: torch.dtype):
        self._scaler = None
        if dtype == torch.float16:
            self._scaler = DynamicGradScaler(
                FIRST_SCALE, LEAST_SCALE, 2.0, 0.5, growth_interval=GROWS_AFTER, hysteresis=1
            )
        self._read()

    def _read(self) -> None:
        self.value = 1.0 if self._scaler is None else float(self._scaler.scale)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss that the backward pass starts at."""
        return loss * self.value

    def divide_out(self, chunks: Iterable[DistributedDataParallel]) -> None:
        """Divide the summed gradients of the chunks by the scale."""
        for chunk in chunks if self.value != 1 else ():
            chunk.scale_gradients(1 / self.value)

    @property
    def exhausted(self) -> str:
        """What to say of an overflow at the smallest scale; empty at others."""
        if self._scaler is None or self.value > LEAST_SCALE:
            return ""
        return f", beyond fp16's range at the smallest loss scale {LEAST_SCALE:g}: set model.precision to bf16"

    def metrics(self) -> dict[str, Metric]:
        """Return `train/loss_scale`; nothing where the scale is always 1."""
        return {} if self._scaler is None else {"train/loss_scale": Metric(self.value, reduce="last")}

    def update(self, overflowed: bool) -> bool:
        """Halve the scale after an overflow, or count a pass without one. Return whether the pass can be repeated at a
        smaller scale."""
        before = self.value
        if self._scaler is not None:
            self._scaler.update(overflowed)
            self._read()
        return overflowed and self.value < before

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds; empty where the scale is always 1."""
        return {} if self._scaler is None else cast(dict[str, Any], self._scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; a run that was saved in another precision starts with the first scale."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)
            self._read()
