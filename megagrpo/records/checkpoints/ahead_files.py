"""Groups that were generated ahead, in a checkpoint: a file of JSON lines per replica, for any number of replicas."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from megagrpo.platform.parallel.layout import Layout
from megagrpo.weights.files.file_checksums import ahead_file

_PLACE = re.compile(rb'\{"place": (\d+),')  # the start of a line


def write_ahead(groups: Iterable[dict[str, Any]], folder: Path, dp_rank: int) -> int | None:
    """Write the groups of a replica to its file, and return the CRC-32 of the file. Each group begins with its `place`.
    Without groups there is no file."""
    crc, lines = 0, ((json.dumps(group) + "\n").encode() for group in groups)
    if (first := next(lines, None)) is None:
        return None
    with open(folder / ahead_file(dp_rank), "wb") as file:
        for line in chain([first], lines):
            file.write(line)
            crc = zlib.crc32(line, crc)
        file.flush()
        os.fsync(file.fileno())
    return crc


def read_ahead(folder: Path, dp_rank: int, dp_size: int) -> Iterator[dict[str, Any]]:
    """Yield the groups in a checkpoint that belong to replica `dp_rank` of `dp_size`: their place depends on it."""
    for path in sorted(path for path in folder.glob(ahead_file("*")) if path.is_file()):
        with open(path, "rb") as lines:
            for line in lines:
                if (place := _PLACE.match(line)) is None:
                    raise ValueError(f"{path} has a line without a place; remove the file to generate its groups again")
                if int(place[1]) % dp_size == dp_rank:
                    yield json.loads(line)


def sums_of_ahead(crc: int | None, layout: Layout) -> dict[str, str]:
    """Return the checksums of the files of all replicas by name. `crc` is that of this leader's file. Collective."""
    table = torch.zeros(layout.dp_size, dtype=torch.int64)  # 0: no file
    if crc is not None:
        table[layout.dp_rank] = crc + 1
    sums = layout.all_reduce(table).tolist()
    return {ahead_file(dp_rank): f"{value - 1:08x}" for dp_rank, value in enumerate(sums) if value}
