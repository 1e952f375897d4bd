"""The phases of a step: generate, reward, logprobs, train, optimizer, sync. One owner times, shows and marks them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from megagrpo.platform.process.progress_hook import SILENT, SILENT_TASK, Progress, Task


class Phases:
    """Measures the seconds of each phase, shows its progress, and names it in a profile: `with phases("generate") as
    task: ...`.

    Seconds of repeated phases are added up. They are host times: work that a phase leaves queued on a GPU counts for
    the phase that waits for it. A phase inside another one shares its progress, and its seconds count in both.

    `about` begins the progress titles, such as "step 3/40 ". `mark` returns a context that names a profile's range.
    `ended` gets each phase that has ended, and each span between two calls of `collect`, with its start and stop.
    """

    def __init__(self, progress: Progress = SILENT) -> None:
        self.about = ""
        self.mark: Callable[[str], AbstractContextManager[object]] = nullcontext  # no profiler
        self.ended: Callable[[str, float, float], None] = lambda name, start, stop: None
        self.task: Task = SILENT_TASK  # of the phase that runs
        self._progress = progress
        self._seconds: dict[str, float] = defaultdict(float)
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[Task]:
        outer = self.task
        shown = self._progress.task(f"{self.about}{phase}") if outer is SILENT_TASK else nullcontext(outer)
        with self.mark(phase), shown as self.task:
            start = time.perf_counter()
            try:
                yield self.task
            finally:
                stop = time.perf_counter()
                self._seconds[phase] += stop - start
                self.task = outer
                self.ended(phase, start, stop)

    def collect(self, span: str = "step") -> dict[str, float]:
        """Return and reset `time/PHASE` for each phase and `time/step`: seconds since the last call or the start.
        `span` names this time for `ended`."""
        now = time.perf_counter()
        self.ended(span, self._started, now)
        metrics = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()} | {
            "time/step": now - self._started
        }
        self._seconds.clear()
        self._started = now
        return metrics
