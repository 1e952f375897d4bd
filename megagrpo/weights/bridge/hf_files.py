"""The layout of safetensors files: file, order and dtype of each tensor, as in the original model or for a new one."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megagrpo.families.hf_config import HfConfig
from megagrpo.families.shared.precisions import QUANTIZATION
from megagrpo.families.shared.stored_names import HEADERS_FILE as HEADERS_FILE
from megagrpo.families.shared.wrapper import TEXT_CONFIG, THINKER
from megagrpo.families.weight_sources import INDEX, NAMED_TEMPLATES, SINGLE, SPEAKERS
from megagrpo.platform.process.progress_hook import SILENT_TASK, Task
from megagrpo.weights.bridge.load import Checkpoint, embedding_and_head, untrained_names
from megagrpo.weights.bridge.untrained_tensors import UNTRAINED_FILE, UNTRAINED_ORIGIN, open_untrained, record_origin
from megagrpo.weights.files.file_checksums import check_inside
from megagrpo.weights.files.partial_files import check_space
from megagrpo.weights.files.tensor_files import METADATA_KEY, Entry, dtype_name, first_bad, make_header, parse_header
from megagrpo.weights.slices.tensor_index import FLOAT32_TENSORS

SIDE_FILE_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".py")
REMOTE_CODE = "auto_map"  # of config.json: class of transformers -> "module.Class", or "repository--module.Class"
SHARD_BYTES = 5 * 2**30
DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json: the new and the old name
_ROWS = 2**26  # bytes cast and written at once

Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
# pairs (from, to) of dtypes between which at least one value has changed
Rounded = set[tuple[torch.dtype, torch.dtype]]


@dataclass(frozen=True)
class File:
    """A safetensors file to write: its name in the folder, and its header."""

    name: str
    header: bytes

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The file's tensors in the order of their bytes."""
        return parse_header(self.header, Path(self.name))

    @property
    def start(self) -> int:
        """Offset of the first tensor byte."""
        return 8 + len(self.header)

    @property
    def nbytes(self) -> int:
        """Size of the whole file in bytes."""
        return self.start + max((entry.stop for entry in self.entries.values()), default=0)


@dataclass(frozen=True)
class Files:
    """All files of a model, and the text of their index, if any."""

    files: tuple[File, ...]
    index: bytes | None

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Every tensor, in the order of the files and of the tensors in them."""
        return {name: entry for file in self.files for name, entry in file.entries.items()}

    def only(self, names: Iterable[str]) -> Files:
        """Return the files with only the tensors in `names`, or this object when all tensors are in `names`."""
        names = set(names)
        return self._with({name: (entry.dtype, entry.shape) for name, entry in self.entries.items() if name in names})

    def in_dtype(self, dtype: torch.dtype, but: Collection[str] = ()) -> Files:
        """Return the files with all tensors in `dtype`, `but` these. Tensors always computed in float32 are not
        narrowed."""

        def chosen(name: str, stored: torch.dtype) -> torch.dtype:
            if name in but:
                return stored
            return stored if name.endswith(FLOAT32_TENSORS) and stored.itemsize > dtype.itemsize else dtype

        return self._with({name: (chosen(name, one.dtype), one.shape) for name, one in self.entries.items()})

    def _with(self, tensors: Tensors) -> Files:
        """Return the files with these tensors, or this object when nothing changes."""
        if tensors == {name: (entry.dtype, entry.shape) for name, entry in self.entries.items()}:
            return self
        files = [_with(file, tensors) for file in self.files if tensors.keys() & file.entries.keys()]
        if self.index is None:
            return Files(tuple(files), None)
        index = json.loads(self.index)
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name in tensors}
        total = sum(entry.nbytes for file in files for entry in file.entries.values())
        index["metadata"] = index.get("metadata", {}) | {"total_size": total}
        return Files(tuple(files), json.dumps(index, indent=2).encode())


def _with(file: File, tensors: Tensors) -> File:
    """Return the file with those of its tensors that are in `tensors`."""
    own = {name: tensors[name] for name in file.entries if name in tensors}
    unchanged = own == {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
    return file if unchanged else File(file.name, make_header(own, json.loads(file.header).get(METADATA_KEY)))


def files_of(folder: Path) -> Files | None:
    """Return the files of the model in `folder`, from weights or a checkpoint's headers; None if it has neither.

    Raises ValueError when a copy of the model would hold a file from elsewhere, before a run or a conversion begins.
    """
    _side_files(folder)
    index = (folder / INDEX).read_bytes() if (folder / INDEX).is_file() else None
    if (folder / HEADERS_FILE).is_file():
        headers = json.loads((folder / HEADERS_FILE).read_text())
        check_inside(headers, folder / HEADERS_FILE)
        return Files(tuple(File(name, text.encode()) for name, text in headers.items()), index)
    if index is None and not (folder / SINGLE).is_file():
        return None
    checkpoint = Checkpoint(folder)
    return Files(tuple(File(name, header) for name, header in checkpoint.headers().items()), checkpoint.index)


def files_for(
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
    hf_config: HfConfig,
    dtype: torch.dtype | None = None,
    limit: int | None = None,
) -> tuple[Files, dict[str, str], list[str]]:
    """Return the files for tensors of these `shapes` and for the untrained tensors of `folder`, tensor -> original for
    tensors that are copies, and the names of the untrained ones.

    The model in `folder` determines the files, if known, and their dtypes when `dtype` is None. Untrained tensors keep
    theirs. A tied head with a separate tensor is a copy. With a `limit` of bytes per file, files are new and `dtype`
    None means config.json's. Raises ValueError when the files lack a tensor or have another shape, or when the
    untrained tensors are gone.
    """
    source = files_of(folder)
    names = untrained_names(source.entries, hf_config) if source else []
    untrained = {name: source.entries[name] for name in names} if source else {}
    open_untrained(folder, untrained)
    if source is None or limit is not None:
        in_dtype = dtype or getattr(torch, hf_config.dtype)
        tensors = {name: (in_dtype, shape) for name, shape in shapes.items()}
        tensors |= {name: (entry.dtype, entry.shape) for name, entry in untrained.items()}
        return new_files(tensors, limit or SHARD_BYTES), {}, names
    copies = {}
    embedding, head = embedding_and_head(hf_config)
    if hf_config.tied_embeddings and head in source.entries and head not in shapes:
        copies = {head: embedding}
    files = source.only(shapes.keys() | copies.keys() | untrained.keys())
    for name, shape in shapes.items():
        if name not in files.entries:
            raise ValueError(f"model: the files of {folder} lack {name}; they belong to another model")
        if files.entries[name].shape != shape:
            stored = f"{files.entries[name].shape} in {folder}, which holds another model"
            raise ValueError(f"model: {name} has shape {shape}, but {stored}")
    if others := sorted(source.entries.keys() - (shapes.keys() | copies.keys() | untrained.keys())):
        raise ValueError(f"model: the files of {folder} hold {others[0]}, which this architecture does not use")
    return files if dtype is None else files.in_dtype(dtype, but=names), copies, names


def new_files(tensors: Tensors, limit: int = SHARD_BYTES) -> Files:
    """Return the fewest files for tensors of these dtypes and shapes with at most `limit` tensor bytes each, with an
    index when there are several."""
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    size = total = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and size + nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size, total = size + nbytes, total + nbytes
    n = len(shards)
    names = [SINGLE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    index = {
        "metadata": {"total_size": total},
        "weight_map": {t: name for name, shard in zip(names, shards, strict=True) for t in shard},
    }
    files = tuple(File(name, make_header(shard)) for name, shard in zip(names, shards, strict=True))
    return Files(files, json.dumps(index, indent=2).encode() if n > 1 else None)


class Writer:
    """Writes `files` into `folder`: headers and index first, then tensors at offsets in any order. A context manager.

    All space is reserved on construction, so too little disk space is an OSError before the first byte. Files of an
    earlier attempt keep their bytes. `rounded` has the dtypes between which the written values have been rounded.
    """

    def __init__(self, folder: Path, files: Files, copies: Mapping[str, str] | None = None):
        self._places = {name: (i, entry) for i, file in enumerate(files.files) for name, entry in file.entries.items()}
        self._files = files
        self._copies = copies or {}
        self.rounded: Rounded = set()
        check_space(folder, sum(max(file.nbytes - _allocated(folder / file.name), 0) for file in files.files))
        self._open = [os.open(folder / file.name, os.O_RDWR | os.O_CREAT, 0o644) for file in files.files]
        for fd, file in zip(self._open, files.files, strict=True):
            os.truncate(fd, file.nbytes)
            os.posix_fallocate(fd, 0, file.nbytes)
            _write_at(fd, len(file.header).to_bytes(8, "little") + file.header, 0)
        if files.index is not None:
            (folder / INDEX).write_bytes(files.index)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open:
            os.close(fd)

    def write(self, name: str, tensor: Tensor) -> int:
        """Cast `tensor`, of the shape in the header and any dtype, to the file's dtype. Write it and its copies; return
        the number of bytes.

        Raises ValueError when a value is NaN or infinite, or becomes infinite by the cast.
        """
        names = [name, *(copy for copy, of in self._copies.items() if of == name)]
        return sum(self._write(stored, tensor) for stored in names)

    def copy_untrained(self, names: Collection[str], source: Path, task: Task) -> None:
        """Copy the untrained tensors `names` as stored in the files of `source`."""
        tensor_of = open_untrained(source, {name: self._places[name][1] for name in names})
        for name in names:
            i, entry = self._places[name]
            data = tensor_of(name).reshape(-1).view(torch.uint8).numpy().data
            _write_at(self._open[i], data, self._files.files[i].start + entry.start)
            task.advance(entry.nbytes)

    def _write(self, name: str, tensor: Tensor) -> int:
        i, entry = self._places[name]
        assert tuple(tensor.shape) == entry.shape, f"{name}: {tuple(tensor.shape)}, not {entry.shape}"
        rows = tensor if tensor.dim() else tensor.reshape(1)
        at = self._files.files[i].start + entry.start
        for part in rows.split(max(1, _ROWS * len(rows) // max(entry.nbytes, 1))):
            cast = part.to(entry.dtype).contiguous()
            if first_bad(cast):
                raise ValueError(_bad(name, part, cast))
            pair = (part.dtype, entry.dtype)
            if pair not in self.rounded and narrows(*pair) and not torch.equal(cast.to(part.dtype), part):
                self.rounded.add(pair)
            data = cast.view(-1).view(torch.uint8).numpy().data
            _write_at(self._open[i], data, at)
            at += len(data)
        return entry.nbytes

    def sync(self) -> None:
        """Return when all written bytes are on the disk."""
        for fd in self._open:
            os.fdatasync(fd)


def narrows(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether `target` cannot hold every value of `source`."""
    return torch.promote_types(source, target) != target


def rounding(rounded: Rounded, cause: str) -> str | None:
    """Return the line about an export whose values were rounded, or None. `cause` says who chose the dtype."""
    if not rounded:
        return None
    targets = ", ".join(sorted({dtype_name(to) for _, to in rounded}))
    exact = reduce(torch.promote_types, (source for source, _ in rounded))
    fix = f"; --dtype {dtype_name(exact)} keeps every bit" if exact != torch.float64 else ""
    return f"rounded to {targets} ({cause}){fix}"


def _bad(name: str, part: Tensor, cast: Tensor) -> str:
    """Return the error for a tensor [...] that is not finite after the cast: broken, or too large for the dtype."""
    if bad := first_bad(part):
        return f"{name} holds {bad}; these weights are broken"
    index = (~torch.isfinite(cast)).nonzero()[0].tolist()
    value, limit = part[tuple(index)].item(), torch.finfo(cast.dtype).max
    where = f"{name} holds {value:g} at {index}, beyond the {limit:g} of {dtype_name(cast.dtype)}"
    return f"{where}; choose float32 or bfloat16 with --dtype"


def _allocated(path: Path) -> int:
    # POSIX counts st_blocks in 512 bytes, whatever the disk's block size
    return path.stat().st_blocks * 512 if path.exists() else 0


def _write_at(fd: int, data: bytes | memoryview, at: int) -> None:
    data = memoryview(data)
    while data:
        written = os.pwrite(fd, data[: 2**30], at)  # Linux writes at most 2 GiB at a time
        data, at = data[written:], at + written


def _side_files(folder: Path) -> list[Path]:
    """Return the files of a model that hold no weights. Raises ValueError for a link out of `folder`, which could lead
    to any file of the user; in the hub's cache, links lead to its `blobs`."""
    found, real = [], folder.resolve()
    inside = (real, *([real.parents[1] / "blobs"] if real.parent.name == "snapshots" else []))
    for file in [*folder.iterdir(), *folder.glob(NAMED_TEMPLATES)]:
        is_index = file.name.endswith(".index.json")  # also pytorch_model.bin.index.json
        is_own = file.name in (HEADERS_FILE, UNTRAINED_ORIGIN)
        is_side = file.suffix in SIDE_FILE_SUFFIXES or file.name == SPEAKERS
        if not is_side or is_index or is_own or not file.is_file():
            continue
        if not any(file.resolve().is_relative_to(root) for root in inside):
            fix = f"copy the model's own files in its place: cp -rL {folder} NEW"
            raise ValueError(f"model: {file} is a link to {file.resolve()}, outside of the folder; {fix}")
        found.append(file)
    return found


def copy_side_files(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy all files that hold no weights: config, tokenizer, chat templates, generation config, custom code. An index
    of weights is not copied: these weights get their own.

    The copy of config.json has no `quantization_config`, because no export is quantized. It names `dtype`, unless None.
    When a .py file in config.json's `auto_map` is missing, the copy has no `auto_map`: the class is then one of
    transformers (`config_keys`), so no code is needed. Raises ValueError for a link that leaves the folder.
    """
    for file in _side_files(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if not (config := target / "config.json").is_file():
        return
    raw = json.loads(config.read_text())
    left_out = {QUANTIZATION} if _has_its_code(raw, target) else {QUANTIZATION, REMOTE_CODE}
    changed = _dense({key: value for key, value in raw.items() if key not in left_out}, dtype)
    if dtype is not None and not {*DTYPE_KEYS} & {*raw}:
        changed[DTYPE_KEYS[-1]] = dtype_name(dtype)
    if changed != raw:
        config.write_text(json.dumps(changed, indent=2) + "\n")


def _dense(raw: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the config.json of weights that are not quantized, with `dtype` in place of its own, and its text model's
    and thinker's; None keeps them."""
    changed = {key: value for key, value in raw.items() if key != QUANTIZATION}
    if dtype is not None:
        changed |= {key: dtype_name(dtype) for key in DTYPE_KEYS if key in raw}
    inner = [key for key in (THINKER, TEXT_CONFIG) if isinstance(raw.get(key), dict)]
    return changed | {key: _dense(raw[key], dtype) for key in inner}


def _has_its_code(raw: dict[str, Any], folder: Path) -> bool:
    """Whether `folder` holds every module that `auto_map` names without a repository."""
    mapped = raw.get(REMOTE_CODE)
    values = mapped.values() if isinstance(mapped, dict) else [mapped]
    named = [name for value in values for name in (value if isinstance(value, list) else [value])]
    names = [name for name in named if isinstance(name, str) and "--" not in name and "/" not in name]
    modules = {name.rpartition(".")[0] for name in names}
    return all((folder / f"{module}.py").is_file() for module in modules)


def carry(
    source: Path, files: Files | None, target: Path, untrained: Collection[str] = (), whole: bool = False
) -> None:
    """Write side files, index and headers of `source` into `target`: everything but the weights that an export to the
    same `files` needs. The `untrained` tensors come along if `whole`; otherwise the name of their folder does."""
    copy_side_files(source, target)
    if files is not None:
        if untrained and whole:
            own = {name: (files.entries[name].dtype, files.entries[name].shape) for name in untrained}
            with Writer(target, Files((File(UNTRAINED_FILE, make_header(own)),), None)) as writer:
                writer.copy_untrained(untrained, source, SILENT_TASK)
                writer.sync()
        elif untrained:
            record_origin(source, target)
        (target / HEADERS_FILE).write_text(
            json.dumps({file.name: file.header.decode() for file in files.files}, indent=1)
        )
        if files.index is not None:
            (target / INDEX).write_bytes(files.index)
