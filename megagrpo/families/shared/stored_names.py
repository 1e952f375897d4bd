"""Names of the tensors in a model's folder, without reading tensors. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

INDEX = "model.safetensors.index.json"  # index of a sharded checkpoint
SINGLE = "model.safetensors"
HEADERS_FILE = "safetensors_headers.json"  # beside a checkpoint's side files: the headers of the original model's files


def stored_names(folder: Path) -> list[str]:
    """Return the names of the tensors in `folder`; [] when it holds no weights, or their list is corrupt: the reader of
    the files says what is wrong."""
    try:
        if (folder / INDEX).is_file():
            return list(json.loads((folder / INDEX).read_bytes())["weight_map"])
        if (folder / HEADERS_FILE).is_file():
            headers = json.loads((folder / HEADERS_FILE).read_bytes()).values()
            return [name for header in headers for name in json.loads(header)]
        with open(folder / SINGLE, "rb") as file:
            return list(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError):
        return []
