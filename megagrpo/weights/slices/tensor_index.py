"""The index of a weight version, for all transports: tensors, shapes, blocks. Also the error type of a weight sync.

With `shared_memory` and `cuda_ipc` the trainer (`sync/trainer_side/`) writes the index to a file that the engine's
workers (`sync/vllm_side/`) read. It then also locates each block: in a file per rank and slot, or in a rank's GPU
buffer. With `p2p` both ends build the index from the boxes of all ranks.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megagrpo.families.shared.boxes import Box, brackets

ENGINE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# vLLM keeps these tensors in float32 for every compute dtype. A bfloat16 engine receives each element as ADDENDS
# bfloat16 numbers that sum to it, along one extra dimension. Rounded to bfloat16, biases of ten or more would select
# other experts.
FLOAT32_TENSORS = ("e_score_correction_bias", "feed_forward.expert_bias")
ADDENDS = 3
ALIGNMENT = 64  # bytes; every block begins at a multiple in its file


def wrong_checksum(rank: int, name: str, box: Box, read: int, written: int) -> str:
    """Return the error text for the part `box` of a tensor that changed on the way from `rank`."""
    return f"rank {rank}, {name}{brackets(box)}: checksum {read:016x} was read; {written:016x} was written"


@dataclass(frozen=True)
class SharedBlock:
    """A tensor's part `box`, contiguous from byte `offset` of `file`. `number` is its index in `rank`'s blocks there.

    `file` is a path, or with `cuda_ipc` the name of a rank's buffer. With `p2p` `rank` is the first rank that holds the
    box; `file`, `offset` and `number` are not used.
    """

    rank: int
    file: str
    offset: int
    box: Box
    number: int

    @staticmethod
    def read(data: dict[str, Any]) -> SharedBlock:
        """Return the block that `data`, its JSON form, describes."""
        lo, hi = data["box"]
        return SharedBlock(**data | {"box": (tuple(lo), tuple(hi))})


@dataclass(frozen=True)
class SharedTensor:
    """One Hugging Face tensor: its full shape and the disjoint blocks that cover it."""

    shape: tuple[int, ...]
    blocks: tuple[SharedBlock, ...]


@dataclass(frozen=True)
class TensorIndex:
    """All weights of one version. `dtype` is a key of ENGINE_DTYPES. `tensors` is in the engine's order of loading."""

    version: int
    dtype: str
    tensors: dict[str, SharedTensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(math.prod(t.shape) for t in self.tensors.values()) * ENGINE_DTYPES[self.dtype].itemsize

    def save(self, path: Path) -> None:
        """Write everything except the version to `path` as JSON."""
        tensors = {name: dataclasses.asdict(tensor) for name, tensor in self.tensors.items()}
        path.write_text(json.dumps({"dtype": self.dtype, "tensors": tensors}))

    @staticmethod
    def load(path: str | Path, version: int) -> TensorIndex:
        """Read a file written by `save`, as the index of `version`."""
        data = json.loads(Path(path).read_text())
        tensors = {
            name: SharedTensor(tuple(tensor["shape"]), tuple(map(SharedBlock.read, tensor["blocks"])))
            for name, tensor in data["tensors"].items()
        }
        return TensorIndex(version, data["dtype"], tensors)


def in_addends(name: str, dtype: str) -> bool:
    """Whether tensor `name` has one extra dimension, of size ADDENDS, on its way to an engine of `dtype`."""
    return dtype == "bfloat16" and name.endswith(FLOAT32_TENSORS)


def addends(values: Tensor) -> Tensor:
    """Split float32 `values` [...] into [..., ADDENDS] bfloat16, whose sums in float32 equal `values` bit for bit."""
    parts = []
    for _ in range(ADDENDS):
        parts.append(values.bfloat16())
        values = values - parts[-1]
    return torch.stack(parts, dim=-1)
