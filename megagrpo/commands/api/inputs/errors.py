"""Errors of the Python API. A wrong config raises `megagrpo.ConfigError`, from `megagrpo.config`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LAST_LINES = 20


@dataclass(eq=False)
class CommandFailed(RuntimeError):
    """A process that the API started has failed.

    Attributes:
        command: The command of the process.
        exit_code: The exit code of the process; 128 + the signal's number after a signal.
        output: The end of what the process printed.
    """

    command: str
    exit_code: int
    output: str

    def __str__(self) -> str:
        return f"{self.command} failed with exit code {self.exit_code}; its last lines:\n{last_lines(self.output)}"


@dataclass(eq=False)
class TrainingFailed(CommandFailed):
    """A training run has failed. `megagrpo.load_run(error.folder)` opens what it has written.

    Attributes:
        exit_code: The exit code of `megagrpo train`; 128 + the signal's number after a signal.
        output: The end of what the run printed.
        folder: The folder of the run.
        log: The file with everything that the run printed.
    """

    folder: Path
    log: Path

    def __str__(self) -> str:
        return (
            f"training failed with exit code {self.exit_code}; the run is in {self.folder}, all its output in "
            f"{self.log}; its last lines:\n{last_lines(self.output)}"
        )


def last_lines(output: str, number: int = LAST_LINES) -> str:
    """Return the last lines of `output` that are not empty."""
    return "\n".join([line for line in output.splitlines() if line.strip()][-number:])
