"""Makes imports faster, and leaves out packages that other packages import without need."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator
from importlib import metadata


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


@contextlib.contextmanager
def one_metadata_scan() -> Iterator[None]:
    """Context manager: inside it, the entry points of all installed packages are read once.

    torch, its launcher and triton each look for plugins, and each search opens a file of every package.
    """
    search = metadata.entry_points
    known = functools.cache(search)
    vars(metadata).update(entry_points=lambda **parameters: known().select(**parameters) if parameters else known())
    try:
        yield
    finally:
        vars(metadata).update(entry_points=search)


@contextlib.contextmanager
def without(*modules: str) -> Iterator[None]:
    """Context manager: imports of `modules` inside it raise ModuleNotFoundError, unless they are imported already.

    It is for libraries that import optional packages at their top and go on without them. Later imports work.
    """
    absent = {name: None for name in modules if name not in sys.modules}
    sys.modules.update(absent)  # type: ignore[arg-type]  # None is Python's mark of a module that cannot be imported
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)
