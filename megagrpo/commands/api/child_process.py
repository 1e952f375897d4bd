"""Child processes of the API: each runs a function of megagrpo in a process of its own and shows its output live here.

A notebook's kernel has threads, an event loop and no terminal, so nothing is forked: each call is a new Python process
in its own session, without standard input. Ctrl-C reaches it once, from here. It gets SIGTERM when this process ends,
also by a kill: a training run then saves and stops.

    python -m megagrpo.commands.api.child_process PARENT FOLDER
"""

from __future__ import annotations

import codecs
import os
import pickle
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from megagrpo.commands.api.inputs.errors import CommandFailed
from megagrpo.commands.api.inputs.exit_codes import one_command, settle_environment
from megagrpo.config import ConfigError
from megagrpo.platform.process.cleanup.parent_death import end_with_parent
from megagrpo.platform.process.cleanup.removal import temporary_folder
from megagrpo.platform.process.cleanup.scratch import temporary_files
from megagrpo.platform.process.terminal import hide_bars_of_libraries, log_to_stderr
from megagrpo.platform.process.variables import ENVIRONMENT

LOG_BYTES = 100_000  # of the end of the log, for errors
COLOURS = ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")  # Jupyter's kernel sets them; a log file should have no escapes
OUTPUT_COLUMNS = "100"  # unless COLUMNS is set
POLL_SECONDS = 0.1  # between two looks at a log
REQUEST, RESULT = "request", "result"  # files: a pickled (function, arguments), and what the function returned
PACKAGE_ROOT = str(Path(__file__).parents[3])


def call(name: str, function: Callable[..., Any], *arguments: Any, log: Path | None = None, quiet: bool = False) -> Any:
    """Call a function of a module in a new process and return its result. Function and arguments are pickled.

    Standard error appears here, standard output does not. With `log` the process appends both to this file, which is
    shown here as it grows, unless `quiet`. The process does not depend on this one: when this one is killed, the
    process can still write, save and stop.

    A first KeyboardInterrupt asks the process to save and stop, a second one to stop, and a third one kills it; after
    its end KeyboardInterrupt is raised. Raises ConfigError, with the process's errors, when its exit code is 2, and
    CommandFailed, which names the command `name`, for other codes but 0: 128 + the signal's number after a signal.
    """
    with temporary_folder("megagrpo_call_") as folder:
        (folder / REQUEST).write_bytes(pickle.dumps((function, arguments)))
        written, result = log or folder / "errors", folder / RESULT
        with written.open("ab") as errors, written.open("rb") as read:
            begin, shown = read.seek(0, os.SEEK_END), None if quiet else sys.stdout if log else sys.stderr
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), str(folder)],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=errors if log else subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            code = _wait(process, lambda: _follow(process, read, shown))
            read.seek(max(begin, read.seek(0, os.SEEK_END) - LOG_BYTES))
            output = read.read().decode("utf-8", errors="replace")
        if code == 2:
            raise ConfigError(output.strip())
        if code:
            raise CommandFailed(name, code, output)
        return pickle.loads(result.read_bytes()) if result.exists() else None


def _wait(process: subprocess.Popen[bytes], forward: Callable[[], None]) -> int:
    """Call `forward`, which waits for the process; return its exit code. Passes on KeyboardInterrupt as a signal."""
    interrupts = 0
    try:
        while True:
            try:
                forward()
                break
            except KeyboardInterrupt:
                interrupts += 1
                process.send_signal(signal.SIGINT if interrupts < 3 else signal.SIGKILL)
    finally:
        if process.poll() is None:  # this process has failed
            process.terminate()
            process.wait()
    if interrupts:
        raise KeyboardInterrupt
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _environment() -> dict[str, str]:
    """Return the environment for a child that imports the same megagrpo and writes plain lines, also under Jupyter."""
    folders = [] if PACKAGE_ROOT == sysconfig.get_path("purelib") else [PACKAGE_ROOT]
    folders += filter(None, ENVIRONMENT.get("PYTHONPATH", "").split(os.pathsep))
    inherited = {name: value for name, value in ENVIRONMENT.items() if name not in COLOURS}
    return {"COLUMNS": OUTPUT_COLUMNS, **inherited, "PYTHONPATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1"}


def _follow(process: subprocess.Popen[bytes], log: IO[bytes], shown: IO[str] | None) -> None:
    """Show what is appended to `log` until the process has ended. Processes that it left are not waited for."""
    over, decoder = False, codecs.getincrementaldecoder("utf-8")(errors="replace")
    while not over:
        over = process.poll() is not None  # before the read, which then sees all that the process wrote
        while shown is not None and (chunk := log.read(65536)):
            shown.write(decoder.decode(chunk))
            shown.flush()
        if not over:
            time.sleep(POLL_SECONDS)


def main(parent: str, folder: str) -> int:
    """Tie this process to its parent, call the function and return the exit code. A function that returns a number
    returns its exit code; other results are written to FOLDER."""
    end_with_parent(int(parent), signal.SIGTERM)
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
