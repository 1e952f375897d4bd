"""Calls a function in a fork, which has what this process has imported and leaves nothing in it."""

import multiprocessing
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_a_fork(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, called in a fork; what it raises, too."""
    with (
        warnings.catch_warnings(action="ignore", category=DeprecationWarning),  # threads of torch's import, which idle
        ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool,
    ):
        return pool.submit(_with_one_thread, function, *args).result()


def _with_one_thread(function: Callable[..., Any], *args: Any) -> Any:
    import torch

    torch.set_num_threads(1)  # a fork cannot use its parent's OpenMP pool
    return function(*args)
