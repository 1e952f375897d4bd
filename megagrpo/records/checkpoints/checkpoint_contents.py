"""Reads a checkpoint's content without its weights: names, shapes, dtypes and sizes of tensors, and metadata."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megagrpo.families.config_keys import text_config
from megagrpo.families.hf_config import load_hf_config, read_raw_config
from megagrpo.records.checkpoints.run_files import STATE_FILE
from megagrpo.weights.bridge.adapter_files import ADAPTER_FILES, CONFIG, WEIGHTS
from megagrpo.weights.bridge.load import Checkpoint
from megagrpo.weights.bridge.megatron_io import HF_FILES, check_is_checkpoint
from megagrpo.weights.files.gpt_checkpoint import newest_iteration
from megagrpo.weights.files.tensor_files import Entry, TensorFile, dtype_name
from megagrpo.weights.files.torch_dist import StoredTensors

A_MODEL = "Hugging Face model"
GROUPS = {"optimizer.": "optimizer", "reference.": "reference"}  # prefix of a tensor's key -> its group


@dataclass(frozen=True)
class TensorRow:
    """A tensor of a checkpoint. `group` is weights, reference or optimizer; `where` is its file, or "N pieces"."""

    name: str
    shape: list[int]
    dtype: str
    nbytes: int
    group: str
    where: str


@dataclass(frozen=True)
class Contents:
    """The content of a checkpoint: its kind, metadata and tensors. `refused` is why a run would not load the model."""

    kind: str
    facts: dict[str, str]
    tensors: list[TensorRow]
    refused: str = ""


def contents(path: Path) -> Contents:
    """Read the content of the checkpoint at `path`. Raises ValueError when it is not a checkpoint, or is damaged."""
    if (path / CONFIG).is_file():
        return _of_adapter(path)
    path = newest_iteration(path)
    return _of_megatron(path) if (path / "metadata.json").is_file() else _of_model(Checkpoint(path))


def _of_model(checkpoint: Checkpoint) -> Contents:
    rows = [_row(name, checkpoint.entry(name), checkpoint.where[name]) for name in checkpoint.where]
    try:
        checkpoint.check_all(load_hf_config(checkpoint.folder))
    except ValueError as error:
        return Contents(A_MODEL, _facts_of_model(checkpoint.folder), rows, str(error))
    return Contents(A_MODEL, _facts_of_model(checkpoint.folder), rows)


def _of_adapter(path: Path) -> Contents:
    config = json.loads((path / CONFIG).read_text())
    facts = {
        key: str(config.get(key))
        for key in ("peft_type", "r", "lora_alpha", "target_modules", "base_model_name_or_path")
    }
    return Contents(
        "adapter", facts, [_row(name, entry, WEIGHTS) for name, entry in TensorFile(path / WEIGHTS).entries.items()]
    )


def _of_megatron(path: Path) -> Contents:
    check_is_checkpoint(path)
    metadata = StoredTensors(path).metadata
    rows, objects = [], []
    for key, value in sorted(metadata.state_dict_metadata.items()):
        if not isinstance(value, TensorStorageMetadata):
            objects.append(key)
            continue
        dtype, pieces = value.properties.dtype, len(value.chunks)
        group = next((group for prefix, group in GROUPS.items() if key.startswith(prefix)), "weights")
        where = "1 piece" if pieces == 1 else f"{pieces} pieces"
        nbytes = math.prod(value.size) * dtype.itemsize
        rows.append(TensorRow(key, list(value.size), dtype_name(dtype), nbytes, group, where))
    facts = {
        "files": str(len({info.relative_path for info in metadata.storage_data.values()})),
        "objects": str(len(objects)),
    }
    if (path / STATE_FILE).is_file():
        facts |= {key: str(value) for key, value in json.loads((path / STATE_FILE).read_text())["state"].items()}
    if (path / HF_FILES).is_dir():
        facts |= _facts_of_model(path / HF_FILES)
    if (path / ADAPTER_FILES).is_dir():
        facts["adapter"] = str(path / ADAPTER_FILES)
    return Contents("Megatron distributed checkpoint", facts, rows)


def _row(name: str, entry: Entry, where: str) -> TensorRow:
    return TensorRow(name, list(entry.shape), dtype_name(entry.dtype), entry.nbytes, "weights", where)


def _facts_of_model(folder: Path) -> dict[str, str]:
    whole = read_raw_config(folder) if (folder / "config.json").is_file() else {}
    config = text_config(whole) | {key: whole[key] for key in ("model_type",) if key in whole}
    keys = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "tie_word_embeddings")
    return {key: str(config[key]) for key in keys if key in config}


def totals(rows: list[TensorRow]) -> dict[str, tuple[int, int, int]]:
    """Return (tensors, elements, bytes) by "GROUP, DTYPE", and for "all"."""
    sums: dict[str, tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
    for row in rows:
        for label in (f"{row.group}, {row.dtype}", "all"):
            count, elements, nbytes = sums[label]
            sums[label] = (count + 1, elements + math.prod(row.shape), nbytes + row.nbytes)
    return dict(sorted(sums.items(), key=lambda item: item[0] == "all"))


def as_text(path: Path, checkpoint: Contents) -> str:
    """Return the content as text: kind, metadata, one line per tensor, totals."""
    lines = [f"{path}: {checkpoint.kind}", *(f"  {key:20} {value}" for key, value in checkpoint.facts.items())]
    width = max((len(row.name) for row in checkpoint.tensors), default=0)
    for row in checkpoint.tensors:
        lines.append(f"{row.name:{width}}  {row.dtype:9} {row.shape!s:20} {row.nbytes:14,}  {row.where}")
    for label, (count, elements, nbytes) in totals(checkpoint.tensors).items():
        lines.append(f"{label}: {count:,} tensors, {elements:,} numbers, {nbytes:,} bytes")
    lines += [f"refused: {checkpoint.refused}"] if checkpoint.refused else []
    return "\n".join(lines)
