"""One conversation of a program, in a process of its own: the work folder, the program, its score, and the clean-up.
A warm process has started its container before it gets its conversation.

The process adopts what the program starts, also daemons (PR_SET_CHILD_SUBREAPER). When its connection to the worker
ends, by a deadline or by a SIGKILL of the run, it kills all of them, runs `stop` and removes the folder.

This module imports no torch.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megagrpo.environments.programs.left_containers import container_name, shared_folder
from megagrpo.environments.programs.work_folder import filled, put_files, read_number, read_text, remove_below
from megagrpo.platform.process.cleanup.ownership import TEMPORARY, make_folder
from megagrpo.platform.process.cleanup.parent_death import end_with_parent, living
from megagrpo.platform.process.cleanup.removal import remove_tree
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.rewards.workers.channel import Channel, from_json

# seconds of `start`, which may fetch an image and is not interrupted, and of `stop`
_START_SECONDS, _STOP_SECONDS = 600.0, 60.0
# variables of the trainer that a program gets; it gets no tokens
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "XDG_RUNTIME_DIR", "DOCKER_HOST")
_PR_SET_CHILD_SUBREAPER = 36
_ALONE = ["{command}"]  # the container of a program without one
_PASSES = 200  # over the processes that a program has left
_READ_BYTES = 1 << 16
_NOT_RUN = (125, 126, 127)  # exit codes of shells and runtimes that could not run a command
_TAIL = 400  # bytes of a failed program's output that its failure shows


@dataclass(frozen=True)
class Program:
    """The options of docs/containers.md, with templates as words."""

    command: Sequence[str]
    container: Sequence[str]
    start: Sequence[str]
    stop: Sequence[str]
    before_score: Sequence[str]
    files: dict[str, str]
    score: Sequence[str]
    score_files: dict[str, str]
    reward_file: str | None
    outputs: dict[str, int]
    variables: Sequence[str]
    output_bytes: int
    seconds: float  # of `start` and `command`
    score_seconds: float

    def environment(self) -> dict[str, str]:
        """Return the variables of this process that a command gets."""
        return {name: ENVIRONMENT[name] for name in (*PASSED_ON, *self.variables) if name in ENVIRONMENT}


class Failure(Exception):
    """Why a conversation has failed."""


class Late(Failure):
    """A command has not ended in its time."""


class Left(Exception):
    """The worker waits for this conversation no longer, or has died."""


def live(program: Program, channel: Channel, is_warm: bool, socket_folder: str) -> None:
    """Hold the conversation that `channel` names in this process, which was forked from a worker, clean up, and send
    the reward. A warm one starts its container before."""
    gc.disable()  # what the worker has open is closed here by number
    os.setsid()  # the guard of the worker's session would kill it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != channel.fileno():
            with suppress(OSError):
                os.close(int(name))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # the worker's folder ends with the worker
    folder, _ = make_folder(TEMPORARY, shared_folder(Path(tempfile.gettempdir()).parent))
    answer: dict[str, Any] | None = None
    try:
        answer = _Conversation(program, channel, folder, socket_folder).hold(is_warm)
    except (Left, EOFError):
        pass
    except KeyError as error:
        answer = {"failure": f"its row has no column {error}"}
    except (Failure, OSError, ValueError) as error:
        answer = {"failure": str(error)}
    finally:
        kill_descendants()
        remove_tree(folder)
    if answer is not None:
        channel.send(answer)


class _Conversation:
    def __init__(self, program: Program, channel: Channel, folder: Path, socket_folder: str):
        self._program, self._channel, self._work = program, channel, folder / "work"
        self._values: dict[str, Any] = {"workdir": str(self._work), "name": container_name(folder)}
        self._values |= {"socket": socket_folder} if socket_folder else {}
        self._forwards, self._is_begun = list[str](), False
        self._has_container = program.container != _ALONE
        self._environment = program.environment()
        self._work.mkdir()
        if not self._has_container:  # else the folder may have another path inside
            (folder / "tmp").mkdir()
            self._environment["TMPDIR"] = str(folder / "tmp")

    def hold(self, is_warm: bool) -> dict[str, Any]:
        """Return the reward as `value`, how the program has `ended`, its `failure` if it has any, and its `outputs`.
        Raises Failure, Left, EOFError, OSError and ValueError."""
        try:
            if is_warm:
                self._start()
            begun, client, columns = self._channel.receive()
            ends, self._values = begun + self._program.seconds, from_json(columns) | self._values
            put_files(self._work, self._program.files, self._values)
            to_policy = {"OPENAI_API_KEY": client["api_key"], "OPENAI_MODEL": client["model"]}
            scheme, _, path = client["base_url"].partition(":")
            if scheme == "unix":
                self._forwards = ["python3", f"{self._values['socket']}/forwarder.py", path]
            else:
                host = urlsplit(client["base_url"]).hostname or ""
                to_policy |= {"OPENAI_BASE_URL": client["base_url"], "NO_PROXY": host, "no_proxy": host}
            if not is_warm:
                self._start()
            result = self._scored(to_policy, max(0.0, ends - time.monotonic()))
        except BaseException:
            with suppress(Failure):
                self._stop()
            raise
        self._stop()
        return result

    def _start(self) -> None:
        self._is_begun = True
        if self._program.start:
            _check(*self._run(self._words(self._program.start), "start", None, _START_SECONDS), "start")

    def _scored(self, to_policy: Mapping[str, str], seconds: float) -> dict[str, Any]:
        """Run the program, and score what it leaves, also if it is late or fails: it may have failed at a limit of the
        address, which the trainer knows."""
        failure, ended = "", "done"
        value: float | None = 0.0
        try:
            command = [*self._forwards, *self._program.command]
            said = self._run(self._inside(command), "command", self._channel, seconds, to_policy)
            if (failure := _failure(*said, "command")) and said[0] in _NOT_RUN:
                raise Failure(failure)
        except Late:
            ended = "time_limit"
        try:
            value = self._reward(is_whole=not failure and ended == "done")
        except Late:
            ended = "time_limit"
        except (Failure, OSError, ValueError):
            if not failure:
                raise
        outputs = {name: read_text(self._work, name, most) for name, most in self._program.outputs.items()}
        return {"value": value, "ended": ended, "failure": failure, "outputs": outputs}

    def _stop(self) -> None:
        if self._program.stop and self._is_begun:
            _check(*self._run(self._words(self._program.stop), "stop", None, _STOP_SECONDS), "stop")

    def _reward(self, is_whole: bool) -> float | None:
        program, value = self._program, None
        if not program.start:  # else its container goes on
            kill_descendants()
        if program.score:
            if program.before_score:
                words, name = self._words(program.before_score), "before_score"
                _check(*self._run(words, name, self._channel, _STOP_SECONDS), name)
            if program.reward_file is not None:  # the agent's is none
                remove_below(self._work, program.reward_file.split("/"))
            put_files(self._work, program.score_files, self._values)
            status, said = self._run(self._inside(program.score), "score", self._channel, program.score_seconds)
            _check(status if status in _NOT_RUN else 0, said, "score")
            value = float(status == 0)
        if program.reward_file is None:
            return value
        try:
            return read_number(self._work, program.reward_file)
        except ValueError:
            if is_whole or program.score:
                raise
            return 0.0

    def _inside(self, command: Sequence[str]) -> list[str]:
        return self._words(self._program.container, [filled(word, self._values) for word in command])

    def _words(self, template: Sequence[str], command: Sequence[str] = ()) -> list[str]:
        words = list[str]()
        for word in template:
            new = [*command] if word == "{command}" else [filled(word, self._values)]
            if word != "{command}" and new[0].startswith("-") and not word.startswith("-"):
                raise Failure(f"the row makes an option of {word}: {new[0]!r:.100}; correct the row")
            words += new
        return words

    def _run(
        self,
        words: Sequence[str],
        what: str,
        watched: Channel | None,
        seconds: float | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        """Run a program until it ends, and return its status and the end of its output. Raises Failure when it cannot
        start, prints too much or is late, and Left when the `watched` connection ends."""
        parent, (reads, writes) = os.getpid(), os.pipe()
        try:
            process = subprocess.Popen(
                words,
                cwd=self._work,
                env=self._environment | dict(extra or {}),
                stdin=subprocess.DEVNULL,
                stdout=writes,
                stderr=writes,
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(parent),
            )
        except (OSError, ValueError) as error:
            os.close(reads)
            raise Failure(f"its {what} cannot start: {error}") from None
        finally:
            os.close(writes)
        try:
            return self._waited(process, reads, what, watched, seconds)
        finally:
            os.close(reads)

    def _waited(
        self, process: subprocess.Popen[bytes], reads: int, what: str, watched: Channel | None, seconds: float | None
    ) -> tuple[int, str]:
        left, tail, ended = self._program.output_bytes, b"", os.pidfd_open(process.pid)
        deadline = None if seconds is None else time.monotonic() + seconds
        os.set_blocking(reads, False)
        poll = select.poll()
        for descriptor in (reads, ended, *([] if watched is None else [watched.fileno()])):
            poll.register(descriptor, select.POLLIN)
        try:
            is_over = False
            while not is_over:
                left_ms = 1000.0 if deadline is None else 1000 * (deadline - time.monotonic()) + 1
                ready = {descriptor for descriptor, _ in poll.poll(min(max(left_ms, 0), 1000))}
                if watched is not None and watched.fileno() in ready:
                    raise Left
                is_over = ended in ready
                if not is_over and deadline is not None and time.monotonic() > deadline:
                    raise Late(f"its {what} has not ended after {seconds:g} s")
                with suppress(BlockingIOError):
                    while left >= 0 and (data := os.read(reads, _READ_BYTES) if reads in ready or is_over else b""):
                        tail, left = (tail + data)[-_TAIL:], left - len(data)
                        if not is_over:
                            break
                    if reads in ready and not data:
                        poll.unregister(reads)
                if left < 0:
                    raise Failure(
                        f"its {what} has printed more than {self._program.output_bytes >> 20} MiB (output_mb)"
                    )
                _reap_orphans(process.pid)
        finally:
            os.close(ended)
            if process.poll() is None:
                process.kill()
                process.wait()
        return process.returncode, tail.decode(errors="replace").strip()


def _failure(status: int, said: str, what: str) -> str:
    """Describe a status that is not 0."""
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
    return f"its {what} {how}: {said or 'it has printed nothing'}" if status else ""


def _check(status: int, said: str, what: str) -> None:
    """Raise Failure for a status that is not 0."""
    if failure := _failure(status, said, what):
        raise Failure(failure)


def _reap_orphans(kept: int) -> bool:
    """Reap adopted processes that have ended, up to the first that is process `kept`. Returns whether any child is
    left."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == kept:
                break
            os.waitpid(ended.si_pid, 0)
        return True
    return False


def kill_descendants() -> None:
    """Kill all processes that this process and its descendants have started. The last one leaves it without a child:
    a list of processes alone may miss one whose parent has just ended."""
    for _ in range(_PASSES):  # they may start others meanwhile; what the kernel cannot end is left
        if not _reap_orphans(0):
            return
        processes, mine = list(living()), {os.getpid()}
        while below := {p.pid for p in processes if p.parent in mine} - mine:
            mine |= below
        for pid in mine - {os.getpid()}:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
