"""Child processes of the API: a command of megagrpo whose output appears here as it comes.

A notebook's kernel has threads, an event loop and no terminal, so nothing is forked: every command is a new Python
process in its own session, without standard input. Ctrl-C reaches it once, from here.
"""

from __future__ import annotations

import codecs
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megagrpo.config import ConfigError

MAIN = "megagrpo.__main__"  # module of the command line
LIMIT = 100_000  # characters of a stream that is shown: only its end is kept
COLOURS = ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")  # Jupyter's kernel sets them; a log file should have no escapes
WIDTH = "100"  # columns of the output, unless COLUMNS is set
POLL_SECONDS = 0.1  # between two looks at a log
DRAIN_SECONDS = 1.0  # after the process has ended: output of processes that it left
PACKAGE_ROOT = str(Path(__file__).parents[3])


@dataclass
class Stream:
    """What a process has written so far. With `shown` it goes on to that file, and only the end is kept."""

    shown: IO[str] | None
    text: str = ""
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def add(self, chunk: bytes) -> None:
        """Take bytes of the process."""
        text = self.decoder.decode(chunk)
        self.text += text
        if self.shown is not None:
            self.shown.write(text)
            self.shown.flush()
            self.text = self.text[-LIMIT:]


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code, 128 + the signal's number after a signal, and what it wrote."""

    exit_code: int
    out: str
    err: str = ""

    @property
    def output(self) -> str:
        """The errors, or else the output."""
        return self.err if self.err.strip() else self.out


def run(module: str, arguments: Sequence[str]) -> Ended:
    """Run `main(arguments)` of `module` in a new process and wait for it. Its standard error appears here, its standard
    output does not.

    A first KeyboardInterrupt asks the process to save and stop, a second one to stop, and a third one kills it; after
    its end KeyboardInterrupt is raised. Raises ConfigError, with the process's errors, when its exit code is 2.
    """
    out, err = Stream(None), Stream(sys.stderr)
    process = _start(module, arguments, subprocess.PIPE, subprocess.PIPE, {})
    try:
        code = _wait(process, lambda: _forward(process, out, err))
    finally:
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None, "both are pipes"
            pipe.close()
    return _ended(Ended(code, out.text, err.text))


def run_logged(module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], show: bool) -> Ended:
    """Like `run`, but the process appends all its output to the file `log`, which is shown here as it grows.

    The process does not depend on this one: when this one is killed, the process can still write, save and stop.
    """
    with log.open("ab") as written, log.open("rb") as read:
        read.seek(0, os.SEEK_END)
        stream = Stream(sys.stdout if show else None)
        process = _start(module, arguments, written, subprocess.STDOUT, environment)
        code = _wait(process, lambda: _follow(process, read, stream))
    return _ended(Ended(code, stream.text))


def _start(
    module: str, arguments: Sequence[str], out: Any, err: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "megagrpo.commands.api.entry", str(os.getpid()), module, *arguments]
    streams = dict(stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    return subprocess.Popen(command, env=_environment(environment), start_new_session=True, **streams)


def _wait(process: subprocess.Popen[bytes], forward: Callable[[], None]) -> int:
    """Call `forward`, which returns when the process has ended, and return the exit code. Passes on KeyboardInterrupt
    as a signal."""
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


def _ended(ended: Ended) -> Ended:
    if ended.exit_code == 2:
        raise ConfigError(ended.output.strip())
    return ended


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for a child that imports the same megagrpo and writes plain lines, also under
    Jupyter."""
    folders = [] if PACKAGE_ROOT == sysconfig.get_path("purelib") else [PACKAGE_ROOT]
    folders += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    inherited = {name: value for name, value in os.environ.items() if name not in COLOURS}
    return {"COLUMNS": WIDTH, **inherited, "PYTHONPATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1", **more}


def _forward(process: subprocess.Popen[bytes], out: Stream, err: Stream) -> None:
    """Pass on the output of the process until it has ended. Processes that it left may keep the pipes open; they are
    not waited for."""
    ended: float | None = None
    with selectors.DefaultSelector() as selector:
        for pipe, stream in ((process.stdout, out), (process.stderr, err)):
            assert pipe is not None, "both are pipes"
            selector.register(pipe, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = selector.select(timeout=0.2)
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                key.data.add(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
            if process.poll() is not None:
                ended = ended or time.monotonic()
                if not ready or time.monotonic() - ended > DRAIN_SECONDS:
                    break
    process.wait()


def _follow(process: subprocess.Popen[bytes], log: IO[bytes], stream: Stream) -> None:
    """Pass on what is appended to `log` until the process has ended."""
    over = False
    while not over:
        over = process.poll() is not None  # before the read, which then sees all that the process wrote
        while chunk := log.read(65536):
            stream.add(chunk)
        if not over:
            time.sleep(POLL_SECONDS)
