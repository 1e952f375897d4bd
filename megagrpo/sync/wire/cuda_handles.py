"""CUDA IPC handles: GPU memory of one process, mapped by others on the same GPUs. A handle is plain JSON, never pickle.

A handle holds the values that `torch.multiprocessing` would pickle for a flat tensor of bytes. Its reference counter
covers one mapping, so each worker gets its own handle. The memory is freed when every worker has released its mapping.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megagrpo.types import WeightSyncError

# Arguments of `rebuild_cuda_tensor` from the eighth on, with their types; the first seven are fixed because the tensor
# is flat bytes.
FIELDS = {
    "storage_handle": bytes,
    "storage_size_bytes": int,
    "storage_offset_bytes": int,
    "requires_grad": bool,
    "ref_counter_handle": bytes,
    "ref_counter_offset": int,
    "event_handle": bytes,
    "event_sync_required": bool,
}

_EXPANDABLE = re.compile(r"(\bexpandable_segments\s*:\s*)True")


def mappable_bytes(count: int, device: torch.device) -> Tensor:
    """Return a buffer [count] uint8 on a GPU, for `export`."""
    with _outside_expandable_segments():
        return torch.empty(count, dtype=torch.uint8, device=device)


@contextmanager
def _outside_expandable_segments() -> Iterator[None]:
    """Context manager: torch's allocator takes no memory from expandable segments, whatever `PYTORCH_ALLOC_CONF` says.

    Most containers do not permit to map such memory, because another process opens it through ptrace (pidfd_getfd).
    torch resets every option that is absent, so all settings are written with one word changed.
    """
    settings = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(_EXPANDABLE.sub(r"\1False", settings))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def export(buffer: Tensor) -> dict[str, Any]:
    """Return a handle of `buffer` [n] uint8 of `mappable_bytes`, for one other process. The tensor must live until
    that process has mapped and released it."""
    flat = buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.storage_offset() == 0
    assert buffer.is_cuda and flat, "a handle describes flat bytes on a GPU"
    # The progress file orders reads after writes. An event would need a GPU that the other process sees, so no event
    # is waited for.
    return pack(buffer.numel(), (*reduce_tensor(buffer)[1][-len(FIELDS) : -1], False))


def release(handle: dict[str, Any]) -> None:
    """Count down the reference of a handle of this process that no other process will release."""
    _, values = unpack(handle)
    fields = dict(zip(FIELDS, values, strict=True))
    torch.UntypedStorage._release_ipc_counter_cuda(fields["ref_counter_handle"], fields["ref_counter_offset"])


def pack(count: int, values: tuple[Any, ...]) -> dict[str, Any]:
    """Return the fields of a handle of `count` bytes as JSON values."""
    texts = [
        base64.b64encode(value).decode() if kind is bytes else value
        for value, kind in zip(values, FIELDS.values(), strict=True)
    ]
    return {"count": count} | dict(zip(FIELDS, texts, strict=True))


def unpack(handle: dict[str, Any]) -> tuple[int, tuple[Any, ...]]:
    """Return the arguments that `pack` received: (count, values). Raises WeightSyncError when `handle` is malformed."""
    if handle.keys() != {"count", *FIELDS}:
        raise WeightSyncError(
            f"a CUDA IPC handle has the fields {', '.join(sorted(handle))}; expected {', '.join(FIELDS)}, count"
        )
    values: list[Any] = []
    for name, kind in {"count": int, **FIELDS}.items():
        value = handle[name]
        try:
            value = base64.b64decode(value, validate=True) if kind is bytes else value
        except (TypeError, ValueError):
            value = None
        if type(value) is not kind:
            raise WeightSyncError(f"a CUDA IPC handle has the invalid value {handle[name]!r} for {name}")
        values.append(value)
    return values[0], tuple(values[1:])


class DeviceMaps:
    """Memory behind `handles`, mapped on this worker's device. The exporting GPU can be invisible to this process."""

    def __init__(self, handles: dict[str, dict[str, Any]], device: torch.device):
        self.handles, self.device = handles, device

    def bytes_of(self, name: str) -> Tensor:
        """Return all bytes of the memory `name`, [n] uint8 on the GPU. Raises WeightSyncError when the handle is
        missing, or CUDA cannot open it."""
        if name not in self.handles:
            raise WeightSyncError(f"no CUDA IPC handle received for the GPU memory {name}")
        count, fields = unpack(self.handles[name])
        flat = (Tensor, (count,), (1,), 0, torch.storage.TypedStorage, torch.uint8, self.device.index or 0)
        try:
            return rebuild_cuda_tensor(*flat, *fields)
        except RuntimeError as error:
            raise WeightSyncError(f"GPU memory {name} cannot be mapped: {str(error).splitlines()[0]}") from None
