"""GPU memory of one process, mapped by others on the same GPUs: handles as plain JSON, never as pickle.

A handle is what `torch.multiprocessing` would pickle for a flat tensor of bytes. Its counter lets one process map it once, so every worker
gets a handle of its own; the memory is free again when all of them have let go.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megagrpo.transfer.manifest import WeightSyncError

# Arguments of `rebuild_cuda_tensor` from its eighth on, and what they are; those before follow from the tensor being flat bytes.
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


def export(buffer: Tensor) -> dict[str, Any]:
    """A handle of a flat tensor of bytes on a GPU, for one other process. The tensor must live until that has mapped it and let go."""
    assert buffer.is_cuda and buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.storage_offset() == 0
    return pack(buffer.numel(), reduce_tensor(buffer)[1][-len(FIELDS) :])


def pack(count: int, values: tuple) -> dict[str, Any]:
    """The fields of a handle of `count` bytes, as JSON can hold them."""
    texts = [base64.b64encode(value).decode() if kind is bytes else value for value, kind in zip(values, FIELDS.values(), strict=True)]
    return {"count": count} | dict(zip(FIELDS, texts, strict=True))


def unpack(handle: dict[str, Any]) -> tuple[int, tuple]:
    """What `pack` was given. WeightSyncError when it is not that."""
    if handle.keys() != {"count", *FIELDS}:
        raise WeightSyncError(f"a handle of GPU memory has the fields {', '.join(sorted(handle))}; {', '.join(FIELDS)} and count are due")
    values = []
    for name, kind in {"count": int, **FIELDS}.items():
        value = handle[name]
        try:
            value = base64.b64decode(value, validate=True) if kind is bytes else value
        except (TypeError, ValueError):
            value = None
        if type(value) is not kind:
            raise WeightSyncError(f"a handle of GPU memory has {handle[name]!r} for {name}")
        values.append(value)
    return values[0], tuple(values[1:])


class DeviceMaps:
    """Memory that `handles` name, mapped on this worker's device; the exporting GPU need not be visible to this process."""

    def __init__(self, handles: dict[str, dict[str, Any]], device: torch.device):
        self.handles, self.device = handles, device

    def bytes_of(self, name: str) -> Tensor:
        """All its bytes, on the GPU. WeightSyncError when there is no such handle, or CUDA cannot open it."""
        if name not in self.handles:
            raise WeightSyncError(f"no handle came for the GPU memory {name}")
        count, fields = unpack(self.handles[name])
        flat = (Tensor, (count,), (1,), 0, torch.storage.TypedStorage, torch.uint8, self.device.index or 0)
        try:
            return rebuild_cuda_tensor(*flat, *fields)
        except RuntimeError as error:
            raise WeightSyncError(f"GPU memory {name} cannot be mapped: {str(error).splitlines()[0]}") from None
