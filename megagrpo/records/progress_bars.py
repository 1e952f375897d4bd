"""Progress of long work: bars at a terminal's bottom that vanish at the end, or lines for a conversion in a pipe."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console
from rich.table import Column
from rich.text import Text

from megagrpo.config import RunSection
from megagrpo.platform.process.progress_hook import SILENT, Progress, Task
from megagrpo.platform.process.terminal import LineTimes, one_line, quiets, warn
from megagrpo.records.terminal_screen import bars_console, is_terminal

FIRST_LINE_SECONDS = 10.0  # of a conversion in a pipe, until the first line
REFRESHES = 5.0  # of the bars per second
TITLE_COLUMNS = 40  # columns of a title
BAR_COLUMNS = 20  # columns of a bar


def run_progress(run: RunSection) -> Progress:
    """Return bars on a terminal; none elsewhere, without `run.progress`, or with a `run.log_level` above info."""
    console = bars_console()
    return SILENT if console is None or not run.progress or quiets(run.log_level, "info") else Bars(console)


def conversion_progress(rank: int = 0) -> Progress:
    """Return bars on a terminal, lines elsewhere, for a command that is one long copy. Only rank 0 shows progress."""
    if rank:
        return SILENT
    console = bars_console()
    return Lines() if console is None else Bars(console)


class Bars:
    """Draws a bar per task at the bottom of a terminal while the task runs. Lines printed meanwhile appear above.

    An error of the terminal ends the bars and never the work.
    """

    def __init__(self, console: Console):
        title, elapsed = (
            bars.TextColumn("{task.description}", markup=False),
            bars.TimeElapsedColumn(table_column=_one_line()),
        )
        columns = (title, bars.BarColumn(BAR_COLUMNS), _Amount(_one_line()), _Rate(_one_line()), elapsed)
        self._drawn = bars.Progress(
            *columns,
            console=console,
            transient=True,
            refresh_per_second=REFRESHES,
            redirect_stdout=is_terminal(sys.stdout),
        )
        self._lock = threading.RLock()
        self._num_open = 0
        self.draws = True

    @contextmanager
    def task(self, title: str) -> Iterator[Task]:
        """Show a bar, or a moving one until its task expects a total."""
        with self._lock, self._errors_end_bars():
            self._num_open += 1
            if self._num_open == 1:
                self._drawn.start()
        number = self._drawn.add_task(_shortened(title), total=None, unit="", tokens=0)
        try:
            yield _Bar(self._drawn, number)
        finally:
            with self._lock, self._errors_end_bars():
                self._num_open -= 1
                if not self._num_open:
                    self._drawn.stop()
            self._drawn.remove_task(number)

    @contextmanager
    def _errors_end_bars(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._drawn.disable, self.draws = True, False


class _Bar:
    def __init__(self, drawn: bars.Progress, number: bars.TaskID):
        self._drawn, self._number, self._tokens = drawn, number, 0

    def expect(self, total: float, unit: str, done: float = 0) -> None:
        self._drawn.update(self._number, total=total, completed=done, unit=unit)

    def advance(self, count: float = 1, tokens: int = 0) -> None:
        self._tokens += tokens
        self._drawn.update(self._number, advance=count, tokens=self._tokens)


class _Amount(bars.ProgressColumn):
    """`12/64 responses`, or `1.21 of 3.40 GB`."""

    def render(self, task: bars.Task) -> Text:
        unit, total = task.fields["unit"], task.total
        if total is None:
            return Text()
        done = min(task.completed, total)
        return Text(f"{size(done)} of {size(total)}" if unit == "B" else f"{done:.0f}/{total:.0f} {unit}")


class _Rate(bars.ProgressColumn):
    """Generated tokens or bytes per second since the task began."""

    def render(self, task: bars.Task) -> Text:
        seconds = task.elapsed or 0.0
        if seconds <= 0:
            return Text()
        if tokens := task.fields["tokens"]:
            return Text(f"{tokens / seconds:,.0f} tokens/s")
        return Text(f"{size(task.completed / seconds)}/s" if task.fields["unit"] == "B" and task.completed else "")


class Lines:
    """Prints a task's line on standard error after 10 s, whenever its time doubles, and at the end with a total."""

    draws = False

    @contextmanager
    def task(self, title: str) -> Iterator[Task]:
        """Show a task by lines. No last line follows an error."""
        lines = _Lines(title)
        yield lines
        lines.show()


class _Lines:
    def __init__(self, title: str):
        self._title, self._total, self._unit, self._before, self._done = title, 0.0, "", 0.0, 0.0
        self._start, self._times = time.monotonic(), LineTimes(FIRST_LINE_SECONDS)

    def expect(self, total: float, unit: str, done: float = 0) -> None:
        self._total, self._unit, self._before, self._done = total, unit, done, done
        if done:
            warn(f"{self._title}: resuming after {self._amount(done)} of {self._amount(total)}")

    def advance(self, count: float = 1, tokens: int = 0) -> None:
        self._done += count
        if self._done < self._total and self._times.due(time.monotonic() - self._start):
            self.show()

    def show(self) -> None:
        """Print the state as a line."""
        if not self._unit:
            return
        seconds = time.monotonic() - self._start
        speed = (self._done - self._before) / max(seconds, 1e-9)
        left = "" if self._done >= self._total else f", {(self._total - self._done) / max(speed, 1):.0f} s left"
        share = self._done / self._total if self._total else 1.0
        warn(
            f"{self._title}: {share:4.0%} of {self._amount(self._total)}, {self._amount(speed)}/s, {seconds:.0f} "
            f"s{left}"
        )

    def _amount(self, number: float) -> str:
        return size(number) if self._unit == "B" else f"{number:.0f} {self._unit}"


def size(nbytes: float) -> str:
    """Return a number of bytes as text, in decimal units."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


def _one_line() -> Column:
    """Return a column that a narrow terminal cuts and never wraps."""
    return Column(no_wrap=True, overflow="crop")


def _shortened(title: str) -> str:
    line = one_line(title)
    return line if len(line) <= TITLE_COLUMNS else f"{line[: TITLE_COLUMNS - 1]}…"
