"""Reads the pickles of a checkpoint as data: only classes that hold numbers and names are created, nothing is called.

The index `.metadata` and objects beside tensors are pickles, and unpickling calls any function that a pickle names.
torch's readers of distributed checkpoints allow it for both, so Megatron's loader runs inside of `data_only`."""

from __future__ import annotations

import io
import pickle
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.safe_globals import SAFE_GLOBALS
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.futures import Future

from megagrpo.weights.files.file_checksums import check_inside

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"  # of checkpoints before megatron-core 0.19
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
# Megatron-LM's arguments and enumerations. Its list also has numpy's arrays, whose pickled state is raw memory.
_OF_ARGUMENTS = {"argparse", "megatron", "pathlib", "signal", "types"}
_LOCK = threading.RLock()  # torch has one list of classes per process


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in RECORDS.get(module, ()):
            why = f"the pickle calls {module}.{name}, which no checkpoint needs"
            raise pickle.UnpicklingError(f"{why}; the call was blocked")
        return super().find_class(module, name)


@cache
def _classes() -> list[type]:
    read = _Records(io.BytesIO())
    found = [read.find_class(module, name) for module, names in RECORDS.items() for name in names if _exists(module)]
    return [cls for cls in found if isinstance(cls, type)]


def _exists(module: str) -> bool:
    return module != "pathlib._local" or sys.version_info >= (3, 13)


@contextmanager
def _unchanged_classes() -> Iterator[None]:
    """Undo what a pickle sets on a class, which would outlive its reading. Raises UnpicklingError if it did."""
    before, changed = {cls: dict(vars(cls)) for cls in _classes()}, []
    try:
        yield
    finally:
        for cls, then in before.items():
            now = dict(vars(cls))
            for name in [name for name in now.keys() | then if now.get(name, now) is not then.get(name, then)]:
                changed.append(f"{cls.__name__}.{name}")
                setattr(cls, name, then[name]) if name in then else delattr(cls, name)
    if changed:
        raise pickle.UnpicklingError(f"the pickle changes {changed[0]}")


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of the checkpoint in `folder`. Raises various errors for a missing or invalid file."""
    with _LOCK, _unchanged_classes(), open(folder / METADATA_FILE, "rb") as file:
        metadata = _Records(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    check_inside({info.relative_path for info in (metadata.storage_data or {}).values()}, folder / METADATA_FILE)
    return metadata


@contextmanager
def _few_classes() -> Iterator[None]:
    """Limit torch.load with `weights_only` to torch's own classes and those of Megatron-LM's arguments."""
    few = [cls for cls in SAFE_GLOBALS if cls.__module__.partition(".")[0] in _OF_ARGUMENTS]
    with _LOCK:
        registered = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(few)
        try:
            yield
        finally:  # a module that was imported meanwhile may have registered more
            torch.serialization.add_safe_globals(registered)


class NotPlainData(ValueError):
    """A file holds a pickle of something else than tensors, plain values and Megatron-LM's arguments."""


@contextmanager
def refusing(name: Any) -> Iterator[None]:
    """Inside, torch.load with `weights_only` reads few classes. Raises NotPlainData, which names the file `name`."""
    try:
        with _few_classes():
            yield
    except pickle.UnpicklingError as error:  # torch's text advises to read the file without protection
        match = re.search(r"GLOBAL (\S+)|Unsupported (?:operand|class|global|type) \S+", str(error))
        why = f"its pickle names {match[1] or match[0]}" if match else "its pickle cannot be read"
        raise NotPlainData(f"{name} is refused: {why}, and data needs no code; do not use this checkpoint") from None


def read_object(file: Path | IO[bytes], name: Any) -> Any:
    """Return what torch.save wrote to `file`, with tensors in host memory. Raises NotPlainData naming `name`, and
    errors of torch for a damaged file."""
    with refusing(name):
        return torch.load(file, map_location="cpu", weights_only=True)


@contextmanager
def data_only() -> Iterator[None]:
    """Make torch's and Megatron's readers of distributed checkpoints read data only, in all threads of the process."""
    read = FileSystemReader.read_data

    def index(reader: FileSystemReader, *_: Any, **__: Any) -> Metadata:
        metadata = read_metadata(Path(reader.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = reader.load_id
        return metadata

    def read_data(reader: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        of_file = defaultdict(list)
        for item in plan.items:
            of_file[reader.storage_data[item.storage_index].relative_path].append(item)
        for name, items in of_file.items():
            with refusing(Path(reader.path, name)):
                read(reader, replace(plan, items=items), planner)
        return read(reader, replace(plan, items=[]), planner)

    def load_bytes(planner: DefaultLoadPlanner, item: ReadItem, value: IO[bytes]) -> None:
        target = planner.original_state_dict if planner.flatten_state_dict else planner.state_dict
        target[item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)

    def common(folder: str) -> Any:
        return read_object(Path(folder, COMMON_FILE), Path(folder, COMMON_FILE))

    with (
        _LOCK,
        patch.multiple(FileSystemReader, read_metadata=index, read_data=read_data),
        patch.object(DefaultLoadPlanner, "load_bytes", load_bytes),
        patch.object(serialization, "load_common", common),
    ):
        yield
