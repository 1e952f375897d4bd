"""`megagrpo COMMAND ...`: parses the command line and runs the command, `commands/COMMAND.py`."""

from __future__ import annotations

if __name__ == "__main__":  # before slow imports: a torchrun that is killed while ranks import leaves no rank
    from megagrpo.platform.process.parent_death import end_with_torchrun

    end_with_torchrun()

import contextlib
import io
import os
import sys
import zlib
from collections.abc import Sequence

from megagrpo.commands.parser import parse
from megagrpo.config import ConfigError
from megagrpo.platform.process.environment import EnvironmentRefused, settle
from megagrpo.platform.process.scratch import temporary_files
from megagrpo.platform.process.terminal import (
    LogLevelError,
    OutputError,
    hide_bars_of_libraries,
    log_to_stderr,
    warn,
    write_output,
)
from megagrpo.platform.process.variables import RENDEZVOUS_VARIABLE

CLOSED_PIPE = 141  # exit code, as of a program that SIGPIPE ends
DOCTOR = "doctor"  # shows the environment of the shell, and writes no file
# Commands that start no ranks, servers or functions of the user: they leave the environment as it is.
READ_ONLY = (DOCTOR, "install", "plan", "init", "keys", "schema", "completion", "report", "inspect", "submit")


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run one command and return its exit code: 2 for a wrong command line, config or environment, 141 without a
    message when the reader of standard output has closed the pipe, 1 when standard output cannot be written. Its
    temporary files are removed. `prog` is the name of the program in the command's help."""
    words = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a character that a terminal cannot show ends no command
    with contextlib.nullcontext() if [*words[:1]] == [DOCTOR] else temporary_files():
        try:
            log_to_stderr()
            try:
                options = parse(words, prog)
            except SystemExit:  # --help or --version has printed its text
                return 0
            if words[0] not in READ_ONLY:
                for text in settle(os.environ):
                    warn(f"warning: {text}")
            if words[0] != DOCTOR:
                hide_bars_of_libraries()
            code = int(options.run(options))
            # flushes what a library has left in the buffer, whose errors Python would print when it exits
            write_output("")
            return code
        except (ConfigError, LogLevelError, EnvironmentRefused) as error:
            if _is_first_to_say(str(error)):
                warn(error)
            return 2
        except OutputError as error:
            if error.is_closed_pipe:
                return CLOSED_PIPE
            warn(error)
            return 1


def _is_first_to_say(text: str) -> bool:
    """Whether no other rank of this launcher has printed `text`: ranks usually find the same problem."""
    folder = os.environ.get(RENDEZVOUS_VARIABLE)
    try:
        if folder:
            os.close(os.open(f"{folder}/said_{zlib.crc32(text.encode(errors='replace')):08x}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


if __name__ == "__main__":
    raise SystemExit(main())
