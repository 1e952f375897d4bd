"""What long work reports as it runs, and a report that shows nothing. `megagrpo.records.progress_bars` draws bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One piece of work. Both methods are cheap and thread-safe."""

    def expect(self, total: float, unit: str, done: float = 0) -> None:
        """Set the amount of the whole work, and the part that is `done`. The unit "B" stands for bytes."""

    def advance(self, count: float = 1, tokens: int = 0) -> None:
        """Count finished work. `tokens` is the number of generated tokens in it."""


class Progress(Protocol):
    """Shows the tasks of this process."""

    @property
    def draws(self) -> bool:
        """Whether a user sees the progress now, so that lines about it are not needed."""

    def task(self, title: str) -> AbstractContextManager[Task]:
        """Show a task until the context ends."""


class _SilentTask:
    def expect(self, total: float, unit: str, done: float = 0) -> None:
        pass

    def advance(self, count: float = 1, tokens: int = 0) -> None:
        pass


class _Silent:
    draws = False

    @contextmanager
    def task(self, title: str) -> Iterator[Task]:
        yield SILENT_TASK


SILENT_TASK: Task = _SilentTask()
SILENT: Progress = _Silent()  # shows nothing: in a pipe, and on all ranks but the first
