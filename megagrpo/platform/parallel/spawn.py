"""Runs a function on N ranks of this machine with an initialised process group, and cleans up afterwards.

Without a GPU the ranks are forks: torch and megatron-core are imported once, so a rank takes a tenth of a second to
start in place of the thirteen seconds of a fresh interpreter. Code that starts threads or a process group must then run
in a rank, not in the caller: a fork inherits the locks of threads that it does not have. A CUDA driver does not survive
a fork, so on GPUs the ranks are fresh interpreters.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

# Before the forks: otherwise torch and Megatron's optimizer import torch._dynamo and this module in each rank.
import megatron.core.models.mimo.optimizer  # noqa: F401
import torch
import torch._dynamo
from torch.distributed.constants import default_pg_timeout

import megagrpo.platform.parallel.layout  # noqa: F401
from megagrpo.platform import device
from megagrpo.platform.parallel.rank_rendezvous import join_world
from megagrpo.platform.process.atomic_file import write_atomically
from megagrpo.platform.process.cleanup.parent_death import end_with_parent
from megagrpo.platform.process.cleanup.removal import temporary_folder
from megagrpo.platform.process.variables import RENDEZVOUS_VARIABLE, changed, put


class RankFailed(RuntimeError):
    """Raised when a rank raised, died or did not finish in time; the message holds its traceback."""


def run_ranks(
    function: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 120.0,
    env: dict[str, str] | None = None,
    start: Literal["fork", "spawn"] | None = None,
) -> list[Any]:
    """Run `function(*args)` on `n` ranks at once; return the ranks' results (picklable) in rank order.

    Each rank has a default process group, which `init_layout` uses. The first failure kills the others and raises
    RankFailed with the failing rank's traceback; so does a rank that has not finished after `timeout` seconds. Ranks
    die with the caller, even if the caller is killed. `start` is "fork" or "spawn"; "spawn" needs a picklable function
    and arguments. None chooses by machine.
    """
    start = start or ("spawn" if device.has_gpu() else "fork")
    context = multiprocessing.get_context("spawn") if start == "spawn" else multiprocessing.get_context("fork")
    with temporary_folder("ranks_") as folder:
        (folder / "secret").write_text(secrets.token_hex(32))
        ranks: dict[int, BaseProcess] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for rank in range(n):
                ranks[rank] = context.Process(target=_rank, args=(rank, n, folder, os.getpid(), function, args))
                # the environment of its start: a fresh interpreter reads it when it imports torch
                with changed(env or {}), warnings.catch_warnings():
                    # torch warns of its two idle helper threads, which no rank needs
                    warnings.simplefilter("ignore", DeprecationWarning)
                    ranks[rank].start()
            _wait(ranks, folder, timeout)
        finally:
            for process in ranks.values():
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [pickle.loads((folder / f"result_{rank}").read_bytes()) for rank in range(n)]


def _wait(ranks: dict[int, BaseProcess], folder: Path, timeout: float) -> None:
    """Wait until all ranks have exited with code 0. Raises RankFailed once one has not, or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while running := [rank for rank, process in ranks.items() if process.exitcode is None]:
        if any(process.exitcode for process in ranks.values()):
            break
        if time.monotonic() > deadline:
            raise RankFailed(f"ranks {running} did not finish within {timeout:g} s")
        time.sleep(0.005)
    if any(process.exitcode for process in ranks.values()):
        raise RankFailed(_explain(ranks, folder))


def _explain(ranks: dict[int, BaseProcess], folder: Path) -> str:
    """Describe the rank that failed first, as far as this is known: one that died without a traceback, or one whose
    error is not a lost connection to a peer."""
    time.sleep(0.2)  # let the other ranks write their tracebacks
    texts = {int(file.name.removeprefix("error_")): file.read_text() for file in folder.glob("error_*")}
    for rank, process in ranks.items():
        if process.exitcode and rank not in texts:
            code = process.exitcode
            return f"rank {rank}: {f'killed by {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'}"
    causes = [rank for rank, text in sorted(texts.items()) if "Connection" not in text.splitlines()[-1]]
    culprit = causes[0] if causes else min(texts)
    return f"rank {culprit}:\n{texts[culprit]}"


def _rank(rank: int, n: int, folder: Path, parent: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run one rank and exit the process; never returns."""
    end_with_parent(parent)
    gc.freeze()  # the garbage collector would touch, and so copy, every page that the fork inherits
    code = 1
    try:
        put({"RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n)})
        put({RENDEZVOUS_VARIABLE: str(folder)})
        if not device.has_gpu():
            torch.set_num_threads(1)  # a fork cannot use its parent's OpenMP pool
        device.select_local_device()
        join_world(device.backend(), default_pg_timeout)
        if not device.has_gpu():
            # gloo fails in a rank that still connects while another one closes its group or exits
            torch.distributed.barrier()
        result = function(*args)
        (folder / f"result_{rank}").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        write_atomically(folder / f"error_{rank}", traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for child in multiprocessing.active_children():
            child.terminate()
        os._exit(code)  # skip destructors: a fork's objects belong to its parent
