"""Tensors that a family does not train, such as layers that predict further tokens and vision towers. Exports hold them
as loaded: the writer copies their bytes from the model's files, one at a time, and no rank loads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from megagrpo.families.shared.stored_names import HEADERS_FILE
from megagrpo.weights.bridge.load import Checkpoint, counted
from megagrpo.weights.files.tensor_files import Entry, TensorFile

UNTRAINED_FILE = "untrained_tensors.safetensors"  # beside the side files of a converted checkpoint: the tensors
UNTRAINED_ORIGIN = "untrained_tensors.json"  # beside the side files of a run's checkpoint: the folder of the tensors


def record_origin(source: Path, target: Path) -> None:
    """Write to `target`, a run's checkpoint, that the untrained tensors are in `source`."""
    (target / UNTRAINED_ORIGIN).write_text(json.dumps({"folder": str(source.absolute())}))


def open_untrained(folder: Path, entries: Mapping[str, Entry]) -> Callable[[str], Tensor]:
    """Return the function from the name of a tensor in `entries` to the tensor, a view of its file.

    `folder` has the model's files, or the side files of a checkpoint, which hold the tensors or name their folder.
    Raises ValueError with the fix if they are gone, or have other dtypes or shapes than `entries`.
    """
    if not entries:
        return lambda name: _raise(folder, name)
    where = _folder_of(folder, entries)
    if (where / UNTRAINED_FILE).is_file():
        file = TensorFile(where / UNTRAINED_FILE)
        stored, tensor = file.entries, file.tensor
    else:
        model = Checkpoint(where)
        stored, tensor = {name: model.entry(name) for name in model.where}, model.tensor
    for name, entry in entries.items():
        if name not in stored or (stored[name].dtype, stored[name].shape) != (entry.dtype, entry.shape):
            said = f"{where} has no {name} of dtype {entry.dtype} and shape {entry.shape}, as it had at the start"
            raise ValueError(f"model: {said}; {_FIX}")
    return tensor


_FIX = "put the original model back there, or name it: megagrpo export CHECKPOINT OUT --model MODEL"


def _folder_of(folder: Path, entries: Mapping[str, Entry]) -> Path:
    """Return the folder whose files have the tensors."""
    if not (folder / HEADERS_FILE).is_file() or (folder / UNTRAINED_FILE).is_file():
        return folder
    said = f"the weights that the model does not train ({counted([*entries])})"
    try:
        origin = Path(json.loads((folder / UNTRAINED_ORIGIN).read_text())["folder"])
    except OSError:
        raise ValueError(f"model: {folder} does not say where {said} are; {_FIX}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"model: {folder / UNTRAINED_ORIGIN} is corrupt: {error!r}; copy it again") from None
    if not origin.is_dir():
        raise ValueError(f"model: {said} were in {origin}, which no longer exists; {_FIX}")
    return origin


def _raise(folder: Path, name: str) -> Tensor:
    raise KeyError(f"{name} of {folder} is trained")
