"""Errors of the Python API. A wrong config raises `megagrpo.ConfigError`, from `megagrpo.config`."""

from __future__ import annotations

from pathlib import Path

LAST_LINES = 20


class CommandFailed(RuntimeError):
    """A process that the API started has failed.

    Attributes:
        exit_code: The exit code of the process; 128 + the signal's number after a signal.
        output: The end of what the process printed.
    """

    def __init__(self, command: str, exit_code: int, output: str) -> None:
        super().__init__(f"{command} failed with exit code {exit_code}; its last lines:\n{last_lines(output)}")
        self.command, self.exit_code, self.output = command, exit_code, output

    def __reduce__(self) -> tuple[type[CommandFailed], tuple[object, ...]]:
        return type(self), (self.command, self.exit_code, self.output)


class TrainingFailed(CommandFailed):
    """A training run has failed. `megagrpo.load_run(error.folder)` opens what it has written.

    Attributes:
        exit_code: The exit code of `megagrpo train`; 128 + the signal's number after a signal.
        output: The end of what the run printed.
        folder: The folder of the run.
        log: The file with everything that the run printed.
    """

    def __init__(self, exit_code: int, output: str, folder: Path, log: Path) -> None:
        RuntimeError.__init__(
            self,
            f"training failed with exit code {exit_code}; the run is in {folder}, all its output in {log}; its last "
            f"lines:\n"
            f"{last_lines(output)}",
        )
        self.command, self.exit_code, self.output, self.folder, self.log = (
            "megagrpo train",
            exit_code,
            output,
            folder,
            log,
        )

    def __reduce__(self) -> tuple[type[TrainingFailed], tuple[object, ...]]:
        return type(self), (self.exit_code, self.output, self.folder, self.log)


def last_lines(output: str, number: int = LAST_LINES) -> str:
    """Return the last lines of `output` that are not empty."""
    return "\n".join([line for line in output.splitlines() if line.strip()][-number:])
