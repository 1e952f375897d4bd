"""First module of a process of the API: `python -m megagrpo.commands.api.entry PARENT FOLDER` calls FOLDER's function.

The process gets SIGTERM when the process PARENT ends, also by a kill: a training run then saves and stops.
"""

from __future__ import annotations

import pickle
import signal
import sys
from pathlib import Path

from megagrpo.platform.process.parent_death import end_with_parent

REQUEST, RESULT = "request", "result"  # files in FOLDER: a pickled (function, arguments), and what it returned


def main(parent: str, folder: str) -> int:
    """Tie this process to its parent, call the function and return the exit code. A function that returns a number
    returns its exit code; other results are written to FOLDER."""
    end_with_parent(int(parent), signal.SIGTERM)
    from megagrpo.commands.api.exit_codes import one_command, settle_environment
    from megagrpo.platform.process.scratch import temporary_files
    from megagrpo.platform.process.terminal import hide_bars_of_libraries, log_to_stderr

    with temporary_files(), one_command() as ended:
        log_to_stderr()
        settle_environment()
        hide_bars_of_libraries()
        function, arguments = pickle.loads(Path(folder, REQUEST).read_bytes())
        result = function(*arguments)
        if isinstance(result, int):
            ended.exit_code = result
        else:
            Path(folder, RESULT).write_bytes(pickle.dumps(result))
    return ended.exit_code


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
