"""Child processes of the API: a command of megagrpo whose output appears here as it comes.

A notebook's kernel has threads, an event loop and no terminal, so nothing is forked: every command is a new Python process in its own
session, without standard input. Ctrl-C reaches it once, from here.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from megagrpo.config import ConfigError

MAIN = "megagrpo.__main__"  # module of the command line
LIMIT = 100_000  # characters of a stream that is shown: only its end is kept
COLOURS = ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")  # Jupyter's kernel sets them; a log file should have no escapes
WIDTH = "100"  # columns of the output, unless COLUMNS is set
DRAIN_SECONDS = 1.0  # after the process has ended: output of processes that it left
PACKAGE_ROOT = str(Path(__file__).parents[2])


@dataclass
class Stream:
    """What a process has written to one stream so far. With `shown` it goes on to that file, and only the end is kept."""

    shown: IO[str] | None
    log: IO[str] | None
    text: str = ""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace"))

    def add(self, chunk: bytes) -> None:
        """Take bytes of the process."""
        text = self.decoder.decode(chunk, final=not chunk)
        self.text += text
        for file in (self.shown, self.log):
            if file is not None and text:
                file.write(text)
                file.flush()
        if self.shown is not None:
            self.text = self.text[-LIMIT:]


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code, 128 + the signal's number after a signal, and what it wrote."""

    exit_code: int
    out: str
    err: str

    @property
    def output(self) -> str:
        """The errors, or else the output."""
        return self.err if self.err.strip() else self.out


def run(
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    log: IO[str] | None = None,
    show_output: bool = False,
    show_errors: bool = True,
) -> Ended:
    """Run `main(arguments)` of `module` in a new process and wait for it.

    Standard output and standard error appear in this process's streams if asked for; `log` gets both. A first KeyboardInterrupt asks the
    process to save and stop, a second one to stop, and a third one kills it; after its end KeyboardInterrupt is raised. Raises ConfigError,
    with the process's errors, when its exit code is 2.
    """
    command = [sys.executable, "-m", "megagrpo.api.entry", str(os.getpid()), module, *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(environment or {}),
        start_new_session=True,
    )
    out, err = Stream(sys.stdout if show_output else None, log), Stream(sys.stderr if show_errors else None, log)
    interrupts = 0
    try:
        while True:
            try:
                _forward(process, out, err)
                break
            except KeyboardInterrupt:
                interrupts += 1
                process.send_signal(signal.SIGINT if interrupts < 3 else signal.SIGKILL)
    finally:
        _end(process)
    if interrupts:
        raise KeyboardInterrupt
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if code == 2:
        raise ConfigError(err.text.strip() or out.text.strip())
    return Ended(code, out.text, err.text)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for a child that imports the same megagrpo and writes plain lines, also under Jupyter."""
    folders = [] if PACKAGE_ROOT == sysconfig.get_path("purelib") else [PACKAGE_ROOT]
    folders += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    inherited = {name: value for name, value in os.environ.items() if name not in COLOURS}
    return {"COLUMNS": WIDTH, **inherited, "PYTHONPATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1", **more}


def _forward(process: subprocess.Popen[bytes], out: Stream, err: Stream) -> None:
    """Pass on the output of the process until it has ended. Processes that it left may keep the pipes open; they are not waited for."""
    assert process.stdout is not None and process.stderr is not None, "both are pipes"
    ended: float | None = None
    with selectors.DefaultSelector() as selector:
        for pipe, stream in ((process.stdout, out), (process.stderr, err)):
            if not pipe.closed:
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


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs because this one failed, and close its pipes."""
    if process.poll() is None:
        process.terminate()
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
