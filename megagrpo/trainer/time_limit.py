"""When a run has to stop so that its last checkpoint is complete before its time is over."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable

from megagrpo.config import ConfigError

OUT_OF_TIME = signal.SIGXCPU  # what stands for the time limit among the signals that stop a run
FIRST_SAVE_SECONDS = 60.0  # taken for a checkpoint until one was written
SPARE_SECONDS = 15.0  # to leave after it


class TimeLimit:
    """`ends` is in seconds since 1970, None without a limit. `stop` is called once, perhaps from another thread: at the beginning of a step
    that would not be finished in time, judged by the longest so far, or in the middle of one that takes longer than that."""

    def __init__(self, ends: float | None, stop: Callable[[int], None]):
        self.ends, self._stop = ends, stop
        self._save_seconds, self._longest, self._began = FIRST_SAVE_SECONDS, 0.0, 0.0
        self._timer: threading.Timer | None = None
        self._saved = False

    @property
    def lead_seconds(self) -> float:
        """What must be left when a run stops: half as much again as the longest checkpoint took."""
        return 1.5 * self._save_seconds + SPARE_SECONDS

    def step_begins(self) -> None:
        """Call at the beginning of every step, in which all is counted until the next one begins: evaluation and saving too.

        ConfigError when there is no time for any step: the run would be started again and again.
        """
        if self.ends is None:
            return
        now = time.time()
        left = self.ends - self.lead_seconds - now
        if self._began:
            self._longest = max(self._longest, now - self._began)
        elif left <= 0:
            raise ConfigError(
                f"run.time_limit: {self.ends - now:.0f} s are left when the first step begins, and {self.lead_seconds:.0f} s are for a "
                "checkpoint; raise it, or the time that Slurm gives"
            )
        self._began = now
        self.close()
        if left <= self._longest:
            self._stop(OUT_OF_TIME)
        else:
            self._timer = threading.Timer(left, self._stop, (OUT_OF_TIME,))
            self._timer.daemon = True
            self._timer.start()

    def saved(self, seconds: float) -> None:
        """A checkpoint took so long."""
        self._save_seconds = max(seconds, self._save_seconds if self._saved else 0.0)
        self._saved = True

    def close(self) -> None:
        """Call no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def check_time_limit(time_limit: str | None) -> None:
    """ConfigError for a `run.time_limit` that leaves no time for a step."""
    reserved = 1.5 * FIRST_SAVE_SECONDS + SPARE_SECONDS
    if time_limit is not None and (seconds := seconds_of(time_limit)) <= reserved:
        said = f"{time_limit} is {seconds} s, of which {reserved:.0f} s are for a checkpoint, so no step can begin"
        raise ConfigError(f"run.time_limit: {said}; raise it above {reserved:.0f} s, or leave it empty")


def end_of_run(time_limit: str | None, started: float) -> float | None:
    """When a run that began at `started` has to be over, in seconds since 1970: as Slurm says, else by `run.time_limit`; None: never."""
    slurm = os.environ.get("SLURM_JOB_END_TIME", "")
    if slurm.isdigit() and int(slurm) > 0:
        return float(slurm)
    return None if time_limit is None else started + seconds_of(time_limit)


def seconds_of(time_limit: str) -> int:
    """Seconds in `[days-]hours:minutes:seconds`."""
    days, hours, minutes, seconds = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", time_limit).groups(default="0")
    return ((int(days) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)
