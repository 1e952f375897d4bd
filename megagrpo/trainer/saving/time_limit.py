"""The time limit of a run: when it must stop so that its last checkpoint is complete in time."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megagrpo.config import ConfigError
from megagrpo.platform.process.environment import END_OF_JOB, end_of_job, under_torchrun
from megagrpo.platform.process.variables import ENVIRONMENT

OUT_OF_TIME = signal.SIGXCPU  # the signal number that stands for the time limit in StopRequested
TO_BE_CONTINUED = 85  # exit code of a run that has saved and asks its scheduler to restart it
FIRST_SAVE_SECONDS = 60.0  # assumed duration of a checkpoint until one was written
SPARE_SECONDS = 15.0  # reserve after the last checkpoint


TIME_LIMIT_KEY = "run.time_limit"


class End(NamedTuple):
    """When a run must end, in seconds since 1970, and the key or variable that says so."""

    time: float
    key: str


class TimeLimit:
    """Stops a run before `end`; None without a limit.

    `stop` is called once, possibly from another thread: at the start of a step that would not finish in time, judged by
    the longest step so far, or during a step that takes longer than that.
    """

    def __init__(self, end: End | None, stop: Callable[[int], None]):
        self.end, self._stop = end, stop
        self._save_seconds, self._longest, self._began = FIRST_SAVE_SECONDS, 0.0, 0.0
        self._timer: threading.Timer | None = None
        self._saved = False

    @property
    def lead_seconds(self) -> float:
        """Time that must be left when a run stops: 1.5 times the longest checkpoint so far, plus SPARE_SECONDS."""
        return 1.5 * self._save_seconds + SPARE_SECONDS

    def step_begins(self) -> None:
        """Call this when a step starts. The time until the next call counts for the step, with evaluation and saving.

        Raises ConfigError when there is no time for any step, because the run would be restarted again and again.
        """
        if self.end is None:
            return
        now = time.time()
        left = self.end.time - self.lead_seconds - now
        if self._began:
            self._longest = max(self._longest, now - self._began)
        elif left <= 0:
            raise ConfigError(f"{self.end.key}: {_too_short(self.end, now, 'when the first step begins, ')}")
        self._began = now
        self.close()
        if left <= self._longest:
            self._stop(OUT_OF_TIME)
        else:
            self._timer = threading.Timer(left, self._stop, (OUT_OF_TIME,))
            self._timer.daemon = True
            self._timer.start()

    def saved(self, seconds: float) -> None:
        """Record the duration of a checkpoint."""
        self._save_seconds = max(seconds, self._save_seconds if self._saved else 0.0)
        self._saved = True

    def close(self) -> None:
        """Cancel the timer: `stop` is no longer called."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def check_time_limit(time_limit: str | None) -> None:
    """Check `run.time_limit`. Raises ConfigError when it leaves no time for a step."""
    if time_limit is not None and (seconds := seconds_of(time_limit)) <= _reserved():
        reason = f"{time_limit} is {seconds} s, of which {_reserved():.0f} s are for a checkpoint, so no step can begin"
        raise ConfigError(f"{TIME_LIMIT_KEY}: {reason}; raise it above {_reserved():.0f} s, or leave it empty")


def end_of_run(time_limit: str | None) -> End | None:
    """Return when this run must end; None without a limit. It began when its first process started, and Slurm's end of
    the job takes precedence over `run.time_limit`.

    Raises ConfigError when no time is left for a step.
    """
    check_time_limit(time_limit)
    end = None
    if (job := end_of_job(ENVIRONMENT)) is not None:
        end = End(job, END_OF_JOB)
    elif time_limit is not None:
        end = End(process_start() + seconds_of(time_limit), TIME_LIMIT_KEY)
    now = time.time()
    if end is not None and end.time - now <= _reserved():
        raise ConfigError(
            f"{end.key}: {time_limit if end.key == TIME_LIMIT_KEY else ENVIRONMENT[END_OF_JOB]}: {_too_short(end, now)}"
        )
    return end


def _reserved() -> float:
    """Return the time for the first checkpoint, in seconds, before one was written."""
    return 1.5 * FIRST_SAVE_SECONDS + SPARE_SECONDS


def _too_short(end: End, now: float, when: str = "") -> str:
    fix = (
        "raise it, or leave it empty"
        if end.key == TIME_LIMIT_KEY
        else "start a longer job, or unset the variable if this is not your job"
    )
    return (
        f"{when}{end.time - now:.0f} s are left, of which {_reserved():.0f} s are for a checkpoint, so no step can "
        f"begin; {fix}"
    )


def process_start() -> float:
    """Return the start time of this process, or of its torchrun or launcher of ranks, in seconds since 1970."""
    pid = os.getppid() if under_torchrun(ENVIRONMENT) else os.getpid()
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])  # since the boot
    except (OSError, ValueError, IndexError):
        return time.time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - max(0.0, age)


def seconds_of(time_limit: str) -> int:
    """Convert `[days-]hours:minutes:seconds`, the form that the config accepts, to seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", time_limit)
    assert match is not None, time_limit
    days, hours, minutes, seconds = match.groups(default="0")
    return ((int(days) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)
