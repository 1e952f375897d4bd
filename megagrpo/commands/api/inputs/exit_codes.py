"""Runs the one command of a process: its errors become one message and an exit code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from megagrpo.config import ConfigError
from megagrpo.platform.process.environment import EnvironmentRefused, settle
from megagrpo.platform.process.terminal import LogLevelError, OutputError, warn, write_output
from megagrpo.platform.process.variables import ENVIRONMENT, RENDEZVOUS_VARIABLE

CLOSED_PIPE = 141  # exit code, as of a program that SIGPIPE ends


@dataclass
class Ended:
    """How the command of a process has ended."""

    exit_code: int = 0


@contextlib.contextmanager
def one_command() -> Iterator[Ended]:
    """Set the exit code for the errors of the command inside: 2 for a wrong command line, config or environment, 141
    without a message for a closed pipe at standard output, 1 for other failures to write it, and SystemExit's code."""
    ended = Ended()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a character that a terminal cannot show ends no command
    try:
        yield ended
        # flushes what a library has left in the buffer, whose errors Python would print when it exits
        write_output("")
    except SystemExit as error:  # --help or --version has printed its text, or a signal has come
        ended.exit_code = int(error.code or 0)
    except (ConfigError, LogLevelError, EnvironmentRefused) as error:
        if _is_first_to_say(str(error)):
            warn(error)
        ended.exit_code = 2
    except OutputError as error:
        ended.exit_code = CLOSED_PIPE if error.is_closed_pipe else 1
        if not error.is_closed_pipe:
            warn(error)


def settle_environment() -> None:
    """Remove and replace this process's variables that would harm a run; warn for each. Raises EnvironmentRefused."""
    for text in settle(ENVIRONMENT):
        warn(f"warning: {text}")


def _is_first_to_say(text: str) -> bool:
    """Whether no other rank of this launcher has printed `text`: ranks usually find the same problem."""
    folder = ENVIRONMENT.get(RENDEZVOUS_VARIABLE)
    try:
        if folder:
            os.close(os.open(f"{folder}/said_{zlib.crc32(text.encode(errors='replace')):08x}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
