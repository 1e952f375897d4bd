"""`megagrpo COMMAND ...`: parses the command line and runs the command, `commands/COMMAND.py`."""

from __future__ import annotations

if __name__ == "__main__":  # before slow imports: a torchrun that is killed while ranks import leaves no rank
    from megagrpo.process.parent_death import end_with_torchrun

    end_with_torchrun()

import os
import sys
from collections.abc import Sequence

from megagrpo.commands.parser import parse
from megagrpo.config import ConfigError
from megagrpo.process.scratch import temporary_files
from megagrpo.process.terminal import LogLevelError, OutputError, hide_bars_of_libraries, log_to_stderr, warn, write_output

CLOSED_PIPE = 141  # exit code, as of a program that SIGPIPE ends


@temporary_files()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for a wrong command line or config, 141 without a message when the reader of standard
    output has closed the pipe, 1 when standard output cannot be written. Its temporary files are removed."""
    try:
        hide_bars_of_libraries()
        log_to_stderr()
        try:
            options = parse(sys.argv[1:] if arguments is None else arguments)
        except SystemExit:  # --help or --version has printed its text
            return 0
        code = int(options.run(options))
        write_output("")  # flushes what a library has left in the buffer, whose errors Python would print when it exits
        return code
    except (ConfigError, LogLevelError) as error:
        if os.environ.get("RANK", "0") == "0":
            warn(error)
        return 2
    except OutputError as error:
        if error.is_closed_pipe:
            return CLOSED_PIPE
        warn(error)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
