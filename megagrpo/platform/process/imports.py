"""Speeds up slow imports."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Context manager: imports inside it run without the garbage collector, which later ignores the imported objects.

    Collecting while torch and its dependencies are imported takes a quarter of the time of a short command.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
