"""Runs the one command of a process: its errors become one message and an exit code."""

from __future__ import annotations

import io
import os
import sys
import zlib
from collections.abc import Callable

from megagrpo.config import ConfigError
from megagrpo.platform.process.environment import EnvironmentRefused, settle
from megagrpo.platform.process.terminal import LogLevelError, OutputError, log_to_stderr, warn, write_output
from megagrpo.platform.process.variables import ENVIRONMENT, RENDEZVOUS_VARIABLE

CLOSED_PIPE = 141  # exit code, as of a program that SIGPIPE ends


def exit_code_of(command: Callable[[], int]) -> int:
    """Call `command` and return its exit code: 2 for a wrong command line, config or environment, 141 without a message
    for a closed pipe at standard output, 1 for other failures to write it, and the code of SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a character that a terminal cannot show ends no command
    try:
        log_to_stderr()
        code = command()
        # flushes what a library has left in the buffer, whose errors Python would print when it exits
        write_output("")
        return code
    except SystemExit as ended:  # --help or --version has printed its text, or a signal has come
        return int(ended.code or 0)
    except (ConfigError, LogLevelError, EnvironmentRefused) as error:
        if _is_first_to_say(str(error)):
            warn(error)
        return 2
    except OutputError as error:
        if error.is_closed_pipe:
            return CLOSED_PIPE
        warn(error)
        return 1


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
