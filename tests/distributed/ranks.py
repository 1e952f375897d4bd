"""Run a function on N gloo ranks. Torch and megatron-core are imported once, in pytest's process; ranks are forks of it, so a case
costs a tenth of a second and not the thirteen seconds of a fresh interpreter.

Use: `results = run_ranks(function, 4, *args)`. What starts threads (loading with transformers, servers) or a process group belongs
into a rank, not into pytest's own process: a fork keeps the locks of threads that it does not have.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megagrpo.parallel.layout  # noqa: F401  (imported before the forks, once for all)

torch.set_num_threads(1)  # a fork cannot use its parent's OpenMP pool, so there must be none


class RankFailed(AssertionError):
    """A rank raised, died or did not finish; the message holds its traceback."""


def run_ranks(function: Callable[..., Any], n: int, *args, timeout: float = 120.0, env: dict[str, str] | None = None) -> list[Any]:
    """`function(*args)` on `n` ranks at once; what each returned (picklable), in rank order.

    A rank finds a default gloo process group ready, which `init_layout` uses. The first failure kills the others and raises
    RankFailed with the failing rank's traceback; so does a rank that is not done after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        started = {_fork(rank, n, Path(folder), function, args, env or {}): rank for rank in range(n)}
        alive = dict(started)
        try:
            _wait(alive, Path(folder), time.monotonic() + timeout, timeout)
        finally:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        return [pickle.loads((Path(folder) / f"result_{rank}").read_bytes()) for rank in range(n)]


def _wait(alive: dict[int, int], folder: Path, deadline: float, timeout: float) -> None:
    """Reap the ranks of `alive`, removing them from it, until none is left."""
    while alive:
        for pid in list(alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = alive.pop(pid)
                if status != 0:
                    raise RankFailed(_explain(rank, status, folder))
        if time.monotonic() > deadline:
            raise RankFailed(f"ranks {sorted(alive.values())} are not done after {timeout} s")
        time.sleep(0.005)


def _explain(rank: int, status: int, folder: Path) -> str:
    """What is known about a rank's death. When peers only report a lost connection, the rank that raised something else comes first."""
    time.sleep(0.2)  # let the peers write theirs
    texts = {int(file.name.removeprefix("error_")): file.read_text() for file in folder.glob("error_*")}
    own = [r for r, text in texts.items() if "Connection" not in text.splitlines()[-1]]
    culprit = rank if not own or rank in own else own[0]
    return f"rank {culprit}:\n{texts.get(culprit, f'exit code {os.waitstatus_to_exitcode(status)}')}"


def _fork(rank: int, n: int, folder: Path, function: Callable, args: tuple, env: dict[str, str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():  # torch keeps two idle helper threads from its import on; no rank needs them
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n), **env)
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
        result = function(*args)
        (folder / f"result_{rank}").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        (folder / f"error_{rank}").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for child in multiprocessing.active_children():
            child.terminate()
        os._exit(code)  # no destructors: pytest's belong to the parent
