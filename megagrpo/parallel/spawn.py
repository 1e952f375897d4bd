"""Run a function on N ranks of this machine that find their process group ready, and leave nothing behind.

Without a GPU the ranks are forks: torch and megatron-core are imported once, so a rank costs a tenth of a second and not the thirteen
seconds of a fresh interpreter. What starts threads or a process group belongs into a rank then, not into the caller: a fork keeps the
locks of threads that it does not have. A CUDA driver does not survive a fork, so on GPUs the ranks are fresh interpreters.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

import megagrpo.parallel.layout  # noqa: F401
from megagrpo import device
from megagrpo.parallel.rendezvous import stay_on_this_host
from megagrpo.process.parent_death import end_with_parent

# Above and here: imported before the forks, once for all. Megatron's optimizer would import the last one in each rank, torch the first.
import megatron.core.models.mimo.optimizer  # noqa: F401  # isort: skip


class RankFailed(RuntimeError):
    """A rank raised, died or did not finish; the message holds its traceback."""


def run_ranks(
    function: Callable[..., Any], n: int, *args, timeout: float = 120.0, env: dict[str, str] | None = None, start: str | None = None
) -> list[Any]:
    """`function(*args)` on `n` ranks at once; what each returned (picklable), in rank order.

    A rank finds a default process group ready, which `init_layout` uses. The first failure kills the others and raises RankFailed with the
    failing rank's traceback; so does a rank that is not done after `timeout` seconds. Ranks die with the caller, whatever kills it.
    `start` is "fork" or "spawn", for which function and arguments must be picklable; the machine decides when it is empty.
    """
    context = multiprocessing.get_context(start or ("spawn" if device.has_gpu() else "fork"))
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        ranks: dict[int, BaseProcess] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for rank in range(n):
                ranks[rank] = context.Process(target=_rank, args=(rank, n, Path(folder), os.getpid(), function, args))
                with _environment(env or {}), warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # torch keeps two idle helper threads; no rank needs them
                    ranks[rank].start()
            _wait(ranks, Path(folder), timeout)
        finally:
            for process in ranks.values():
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [pickle.loads((Path(folder) / f"result_{rank}").read_bytes()) for rank in range(n)]


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """The environment that a rank is born with; a fresh interpreter reads it when it imports torch."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _wait(ranks: dict[int, BaseProcess], folder: Path, timeout: float) -> None:
    """Return when every rank has ended well; RankFailed as soon as one has not."""
    deadline = time.monotonic() + timeout
    while running := [rank for rank, process in ranks.items() if process.exitcode is None]:
        if any(process.exitcode for process in ranks.values()):
            break
        if time.monotonic() > deadline:
            raise RankFailed(f"ranks {running} are not done after {timeout:g} s")
        time.sleep(0.005)
    if any(process.exitcode for process in ranks.values()):
        raise RankFailed(_explain(ranks, folder))


def _explain(ranks: dict[int, BaseProcess], folder: Path) -> str:
    """Which rank failed first, as far as that can be told: one that died without a word, or raised something else than that its
    connection to a peer was lost."""
    time.sleep(0.2)  # let the peers write theirs
    texts = {int(file.name.removeprefix("error_")): file.read_text() for file in folder.glob("error_*")}
    for rank, process in ranks.items():
        if process.exitcode and rank not in texts:
            code = process.exitcode
            return f"rank {rank}: {f'killed by {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'}"
    own = [rank for rank, text in sorted(texts.items()) if "Connection" not in text.splitlines()[-1]]
    culprit = own[0] if own else min(texts)
    return f"rank {culprit}:\n{texts[culprit]}"


def _rank(rank: int, n: int, folder: Path, parent: int, function: Callable, args: tuple) -> None:
    """The life of one rank; never returns."""
    end_with_parent(parent)
    gc.freeze()  # the collector would touch, and so copy, every page of what the fork has inherited
    code = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n))
        if not device.has_gpu():
            torch.set_num_threads(1)  # a fork cannot use its parent's OpenMP pool
        device.select_local_device()
        stay_on_this_host()
        torch.distributed.init_process_group(device.backend(), init_method=f"file://{folder}/store", rank=rank, world_size=n)
        result = function(*args)
        (folder / f"result_{rank}").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        unfinished = folder / f"writing_{rank}"
        unfinished.write_text(traceback.format_exc())
        unfinished.rename(folder / f"error_{rank}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for child in multiprocessing.active_children():
            child.terminate()
        os._exit(code)  # no destructors: a fork's belong to its parent
