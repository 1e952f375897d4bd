"""Mixed into the workers of a server under test (`--worker-extension-cls`): has one of them stop itself, by SIGSTOP, at a chosen moment of
its next weight update. What resumes or kills it is the test."""

import os
import signal

from megagrpo.vllm_plugin.engine import ShardEngine
from megagrpo.vllm_plugin.reader import ShardReader
from megagrpo.vllm_plugin.worker_verbs import WorkerVerbs

due: dict[str, int] = {}  # moment -> how often it passes before the worker stops


def pass_or_stop(moment: str) -> None:
    if moment not in due:
        return
    due[moment] -= 1
    if due[moment] < 0:
        del due[moment]
        os.kill(os.getpid(), signal.SIGSTOP)


def before(owner: type, method: str, moment: str) -> None:
    original = getattr(owner, method)

    def halting(*args, **kwargs):
        pass_or_stop(moment)
        return original(*args, **kwargs)

    setattr(owner, method, halting)


before(ShardEngine, "start_weight_update", "start")
before(ShardEngine, "finish_weight_update", "finish")
before(ShardReader, "fill", "update")


class Halting(WorkerVerbs):
    def halt(self, worker: int, moment: str, passes: int = 0) -> int:
        """Stop worker number `worker` when `moment` ("start", "update": a copy of weights, "finish") comes the next time but `passes`; its
        process id."""
        if self.rank == worker:
            due[moment] = passes
        return os.getpid()
