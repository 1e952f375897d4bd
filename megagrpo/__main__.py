"""`megagrpo COMMAND ...`: parses the command line and runs the command, `commands/COMMAND.py`."""

from __future__ import annotations

if __name__ == "__main__":  # before slow imports: a torchrun that is killed while ranks import leaves no rank
    from megagrpo.platform.process.cleanup.parent_death import end_with_torchrun

    end_with_torchrun()

import contextlib
import sys
from collections.abc import Sequence

from megagrpo.commands.api.inputs.exit_codes import one_command, settle_environment
from megagrpo.commands.parser import parse
from megagrpo.platform.process.cleanup.scratch import temporary_files
from megagrpo.platform.process.terminal import hide_bars_of_libraries, log_to_stderr

DOCTOR = "doctor"  # shows the environment of the shell, and writes no file
# Commands that start no ranks, servers or functions of the user: they leave the environment as it is.
READ_ONLY = (DOCTOR, "install", "plan", "init", "keys", "schema", "report", "inspect", "submit")


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run one command and return its exit code, as `one_command` defines it. Its temporary files are removed.

    `prog` is the name of the program in the command's help.
    """
    words = sys.argv[1:] if arguments is None else arguments
    with contextlib.nullcontext() if [*words[:1]] == [DOCTOR] else temporary_files(), one_command() as ended:
        log_to_stderr()
        options = parse(words, prog)
        if words[0] not in READ_ONLY:
            settle_environment()
        if words[0] != DOCTOR:
            hide_bars_of_libraries()
        ended.exit_code = int(options.run(options))
    return ended.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
