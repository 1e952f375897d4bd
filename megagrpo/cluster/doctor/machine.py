"""Reads files, commands and environment variables of this machine, and holds the result of a check."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from megagrpo.platform.process.variables import ENVIRONMENT

COMMAND_SECONDS = 20.0  # nvidia-smi takes several seconds on eight GPUs without persistence mode
STATES = ("ok", "warn", "fail", "skipped")


@dataclass(frozen=True)
class Finding:
    """What a check found: subject, result, a state of `STATES`, and the fix, which is empty when the state is ok."""

    subject: str
    result: str
    state: str = "ok"
    fix: str = ""


def judged(subject: str, result: str, passed: bool, fix: str, state: str = "warn") -> Finding:
    """Return a finding with state ok if `passed`, else with `state` and `fix`."""
    return Finding(subject, result) if passed else Finding(subject, result, state, fix)


@dataclass
class Machine:
    """This machine, as its files, its commands and the environment show it.

    `root` is the folder whose `proc`, `sys` and `dev` are read. The output of each command is kept, because several
    checks read it and the report includes it.
    """

    root: Path = Path("/")
    environment: dict[str, str] = field(default_factory=lambda: dict(ENVIRONMENT))
    # command line -> standard output of each command that succeeded
    outputs: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # command line -> why a command failed

    def read(self, path: str) -> str | None:
        """Return the stripped content of a file below `root`; None if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def folders(self, pattern: str) -> list[Path]:
        """Return the sorted paths below `root` that match a glob pattern."""
        return sorted(self.root.glob(pattern))

    def run(self, *command: str) -> str | None:
        """Return a command's standard output; None if it is missing, fails or takes over `COMMAND_SECONDS`."""
        line = " ".join(command)
        if line not in self.outputs and line not in self.errors:
            self._start(command, line)
        return self.outputs.get(line)

    def _start(self, command: tuple[str, ...], line: str) -> None:
        program = shutil.which(command[0], path=self.environment.get("PATH", os.defpath))
        if program is None:
            self.errors[line] = f"{command[0]}: not found on PATH"
            return
        try:
            ended = subprocess.run(
                [program, *command[1:]],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMMAND_SECONDS,
                env=self.environment,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self.errors[line] = f"{command[0]}: {error}"
            return
        if ended.returncode:
            output = " ".join((ended.stdout + ended.stderr).split())
            self.errors[line] = f"{command[0]}: exit code {ended.returncode}: {output}"
        else:
            self.outputs[line] = ended.stdout
