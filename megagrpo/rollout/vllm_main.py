"""Runs vLLM's OpenAI API server on a machine without a GPU, importing vLLM once instead of once per process.

vLLM for CPU starts its engine and its workers with the start method "spawn", only so that each can get its own OpenMP settings. Our
servers share one set (`VLLM_CPU_OMP_THREADS_BIND=nobind`), so the processes fork, as they do by default on a GPU: this takes two
imports of vLLM, 10 to 25 s each, off the start. It can go when vLLM for CPU lets `VLLM_WORKER_MULTIPROC_METHOD` decide.
"""

import gc
import multiprocessing
import runpy


def _fork_instead_of_spawn() -> None:
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)


def _sleep_instead_of_spin() -> None:
    """Let the engine's process sleep while a worker computes. It polls in a busy loop, for a second each time, and so takes a core away
    from the worker: with two cores generation takes 1.7 times as long. Can go when vLLM has a setting for `busy_loop_s`."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    init = SpinCondition.__init__

    def init_asleep(self, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        self.busy_loop_s = 0

    SpinCondition.__init__ = init_asleep


if __name__ == "__main__":
    _fork_instead_of_spawn()
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    _sleep_instead_of_spin()

    gc.freeze()  # the collector would otherwise touch, and so copy, every inherited page
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
