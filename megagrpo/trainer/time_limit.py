"""The time limit of a run: when it must stop so that its last checkpoint is complete in time."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable

from megagrpo.config import ConfigError

OUT_OF_TIME = signal.SIGXCPU  # the signal number that stands for the time limit in StopRequested
TO_BE_CONTINUED = 85  # exit code of a run that has saved and asks its scheduler to restart it
FIRST_SAVE_SECONDS = 60.0  # assumed duration of a checkpoint until one was written
SPARE_SECONDS = 15.0  # reserve after the last checkpoint


class TimeLimit:
    """Stops a run before its time limit. `ends` is in seconds since 1970, None without a limit.

    `stop` is called once, possibly from another thread: at the start of a step that would not finish in time, judged by the longest step so
    far, or during a step that takes longer than that.
    """

    def __init__(self, ends: float | None, stop: Callable[[int], None]):
        self.ends, self._stop = ends, stop
        self._save_seconds, self._longest, self._began = FIRST_SAVE_SECONDS, 0.0, 0.0
        self._timer: threading.Timer | None = None
        self._saved = False

    @property
    def lead_seconds(self) -> float:
        """Time that must be left when a run stops: 1.5 times the longest checkpoint so far, plus SPARE_SECONDS."""
        return 1.5 * self._save_seconds + SPARE_SECONDS

    def step_begins(self) -> None:
        """Call this at the start of every step. The time until the next call counts for the step, including evaluation and saving.

        Raises ConfigError when there is no time for any step, because the run would be restarted again and again.
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
    reserved = 1.5 * FIRST_SAVE_SECONDS + SPARE_SECONDS
    if time_limit is not None and (seconds := seconds_of(time_limit)) <= reserved:
        reason = f"{time_limit} is {seconds} s, of which {reserved:.0f} s are for a checkpoint, so no step can begin"
        raise ConfigError(f"run.time_limit: {reason}; raise it above {reserved:.0f} s, or leave it empty")


def end_of_run(time_limit: str | None, started: float) -> float | None:
    """Return when a run that began at `started` must end, in seconds since 1970; None without a limit. Slurm's end time takes precedence
    over `run.time_limit`."""
    slurm = os.environ.get("SLURM_JOB_END_TIME", "")
    if slurm.isdigit() and int(slurm) > 0:
        return float(slurm)
    return None if time_limit is None else started + seconds_of(time_limit)


def seconds_of(time_limit: str) -> int:
    """Convert `[days-]hours:minutes:seconds`, the form that the config accepts, to seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", time_limit)
    assert match is not None, time_limit
    days, hours, minutes, seconds = match.groups(default="0")
    return ((int(days) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)
