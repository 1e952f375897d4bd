"""Runs vLLM's OpenAI API server on a machine without a GPU, importing vLLM once instead of once per process.

vLLM for CPU starts its engine and its workers with the start method "spawn", only so that each can get its own OpenMP settings. Our
servers share one set (`VLLM_CPU_OMP_THREADS_BIND=nobind`), so the processes fork, as they do by default on a GPU: this takes two
imports of vLLM, 10 to 25 s each, off the start. It can go when vLLM for CPU lets `VLLM_WORKER_MULTIPROC_METHOD` decide.
"""

import functools
import gc
import multiprocessing
import runpy
import time

from megagrpo.process.parent_death import tie_process_tree


def _fork_instead_of_spawn() -> None:
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)


def _nap_instead_of_spin() -> None:
    """Let processes nap while they wait for each other's messages. vLLM polls in a busy loop, so the engine takes a core away from the
    worker that it waits for. Can go when vLLM has a setting for it."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = functools.partial(time.sleep, 0.0005)


if __name__ == "__main__":
    tie_process_tree()  # EngineCore and workers end with this process, even by SIGKILL
    gc.disable()  # none of what imports make becomes garbage, and looking through it again and again takes a tenth of their time
    _fork_instead_of_spawn()
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    _nap_instead_of_spin()

    gc.freeze()  # the collector would otherwise touch, and so copy, every inherited page
    gc.enable()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
