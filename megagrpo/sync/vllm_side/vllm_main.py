"""Runs vLLM's OpenAI API server, or with --headless a node's workers, without a GPU. Imports vLLM only once.

vLLM for CPU starts its engine and workers with the start method "spawn", only so that each can get its own OpenMP
settings. Our servers share one set (`VLLM_CPU_OMP_THREADS_BIND=nobind`), so the processes fork, as they do by default
on a GPU. Forking saves two imports of vLLM, 10 to 25 s each, per start. With --wait the process imports
vLLM before its server is known. Remove this file when vLLM for CPU follows `VLLM_WORKER_MULTIPROC_METHOD`.
"""

import functools
import gc
import json
import multiprocessing
import os
import runpy
import sys
import time
from typing import Any

from megagrpo.platform.process.cleanup.parent_death import tie_process_tree


def _fork_instead_of_spawn() -> None:
    module: Any = multiprocessing
    get_context = multiprocessing.get_context
    module.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)


def _nap_instead_of_spin() -> None:
    """Make processes sleep 0.5 ms between polls for messages. vLLM polls in a busy loop, so the engine takes a core
    from the worker it waits for. Remove this patch when vLLM has a setting for it."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = functools.partial(time.sleep, 0.0005)


def _skip_llvmlite() -> None:
    """Let vLLM look for kernels in all modules but llvmlite's, whose library object has no plain `__dict__`.

    Workers are forks and inherit llvmlite if the model's processor imports it (Kimi K2.5). Remove this patch when a
    server on Kimi K2.5 starts without it; the tests check that.
    """
    from vllm.triton_utils import dispatcher

    original = dispatcher._rebind_kernels

    @functools.wraps(original)
    def rebind(*arguments: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith("llvmlite")}
        try:
            original(*arguments)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = rebind


def _wait_for_server() -> None:
    """Become the server whose arguments, log and token come on standard input (engine/servers/early_start.py). `ps`
    shows its arguments, and its token is in standard input."""
    from setproctitle import setproctitle

    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(0)  # the trainer needs no server
    server = json.loads(line)
    reader, writer = os.pipe()
    os.write(writer, server["token"].encode())
    os.close(writer)
    os.dup2(reader, 0)
    log = os.open(server["log"], os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.argv[1:] = server["arguments"]
    setproctitle(" ".join([sys.executable, *sys.argv]))


if __name__ == "__main__":
    tie_process_tree()  # EngineCore and workers end when this process ends, even after SIGKILL
    gc.disable()  # imports create no garbage, and repeated collections take a tenth of the import time
    _fork_instead_of_spawn()
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    _nap_instead_of_spin()
    _skip_llvmlite()
    if sys.argv[1:] == ["--wait"]:
        _wait_for_server()
    gc.freeze()  # otherwise the collector would touch every inherited page, which copies it
    gc.enable()
    headless = "--headless" in sys.argv
    runpy.run_module(
        "megagrpo.sync.vllm_side.headless" if headless else "vllm.entrypoints.openai.api_server",
        run_name="__main__",
        alter_sys=True,
    )
