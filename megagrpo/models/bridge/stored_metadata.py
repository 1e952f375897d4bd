"""Reads the index of a distributed checkpoint, a pickle written by torch, without running code from it.

Unpickling calls any function that the pickle names. This reader allows only torch's records of tensors and pieces,
which hold numbers and names. Code that loads a checkpoint with Megatron or torch must first read its index with
`read_metadata`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megagrpo.models.bridge.file_names import check_inside

FILE = ".metadata"
CHECKPOINT = "torch.distributed.checkpoint"
RECORDS = {
    f"{CHECKPOINT}.filesystem": {"_StorageInfo"},
    f"{CHECKPOINT}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{CHECKPOINT}.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},  # the folder that the checkpoint was written to
    "pathlib._local": {"PosixPath"},  # the same class in Python 3.13
}


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in RECORDS.get(module, ()):
            raise pickle.UnpicklingError(
                f"the pickle calls {module}.{name}, which no checkpoint needs; the call was blocked"
            )
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of the checkpoint in `folder`. Raises various errors when the file is missing, damaged or not
    such an index."""
    with open(folder / FILE, "rb") as file:
        metadata = _Records(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    check_inside({info.relative_path for info in (metadata.storage_data or {}).values()}, folder / FILE)
    return metadata
