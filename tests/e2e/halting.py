"""A worker extension (`--worker-extension-cls`) for servers under test: one worker stops itself with SIGSTOP at a
chosen point of its next weight update. The test resumes or kills it."""

import os
import signal

from megagrpo.sync.vllm_side.engine import ShardEngine
from megagrpo.sync.vllm_side.reader import ShardReader
from megagrpo.sync.vllm_side.worker_verbs import WorkerVerbs

due: dict[str, int] = {}  # point of the update -> times to pass it before the worker stops


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
        """Stop worker number `worker` at `moment` ("start", "update": a copy of weights, "finish") after passing it
        `passes` times. Returns its process id."""
        if self.rank == worker:
            due[moment] = passes
        return os.getpid()
