"""Runs untrusted programs in a process confined by the kernel (`child`), and finds guarantees that the kernel lacks."""

from __future__ import annotations

import json
import marshal
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, cast

from megagrpo.platform.process.cleanup.removal import temporary_folder
from megagrpo.rewards.sandbox.counts import Counts

WALLS = ("namespaces", "mounts", "landlock", "seccomp", "counts")
LANDLOCK_ABI = 6  # newest Landlock version in use; a test sets an older one
COUNTS_SINCE = (5, 5)  # the Linux version that can let a counted call continue
FEW_FILES = 16  # limit on files where the folder is on a disk; each may have `file_mb` / FEW_FILES
_CHILD = str(Path(__file__).with_name("sandbox_child.py"))


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program. `seconds` is wall-clock time; CPU time is limited to the next whole number.

    `memory_mb` limits its mappings, and `kernel_bytes` what the kernel keeps for them, for sockets and for file locks.
    `file_mb` and `max_files` (folders count) limit all files together, including deleted ones that are still open.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    output_kb: int = 64
    file_mb: int = 16
    max_files: int = 200
    max_threads: int = 64
    kernel_mb: int = 32

    @property
    def kernel_bytes(self) -> int:
        return (self.kernel_mb << 20) + (self.memory_mb << 20) // 128  # page tables of memory without holes take 1/512


class Checks(TypedDict):
    """What checks a program after it has run.

    A step is (kind, code). The code of a "setup", a "test", and a "check", a test that must call `__checked__()`, is
    Python as text or compiled. There, `with __test__():` reports one more test and `__function__(path)` finds the
    program's function. A "call" calls `function` with positional and keyword arguments; calls come first.
    """

    setup: str  # Python code that runs before the program
    steps: list[tuple[str, Any]]
    function: str  # "" without calls
    count: int  # results: of tests, or of calls
    stop_early: bool  # stop after the first failed test


class Job(TypedDict):
    """What the child process reads with `marshal` from its standard input. Folders are absolute paths."""

    program: str
    checks: Checks | None
    input: str
    token: str  # marks the reports that are not the program's own
    folder: str  # the program's working folder
    root: str  # where the new root is mounted
    readable: list[str]  # files and folders that Python needs
    path: list[str]  # sys.path of the program
    walls: list[str]
    limits: dict[str, Any]  # the values of `Limits`
    few_bytes: int  # limit of a file's bytes where the folder lies on a disk
    landlock_abi: int


@dataclass(frozen=True)
class Ran:
    """The result of a program. `ended` is "done" (also after an exception), "time", "output" or "died".

    `results` has one entry per test (a boolean) or call (a list with its value, None after an exception); without
    checks it has one entry, whether the exit status is 0. It is shorter when the program ended earlier or stopped, and
    "done" then is "died". `walls` tells for each restriction whether it was in place.
    """

    ended: str
    stdout: str
    results: list[Any]
    walls: dict[str, bool]

    @property
    def passed(self) -> list[bool]:
        """Whether each test passed."""
        return [result is True for result in self.results]


def run(
    program: str,
    limits: Limits,
    tests: list[str] | Checks | None = None,
    stdin: str = "",
    walls: tuple[str, ...] = WALLS,
    packages: bool = True,
    report_bytes: int = 1 << 20,
) -> Ran:
    """Run a Python program, then `tests` (texts of Python, or `Checks`) in the same namespace, in a temporary folder
    that is removed afterwards. `report_bytes` limits the length of all results."""
    if isinstance(tests, list):
        steps = [("test", test.encode("utf-8", "replace").decode()) for test in tests]
        tests = Checks(setup="", steps=[*steps], function="", count=len(steps), stop_early=False)
    with temporary_folder("megagrpo_code_") as folder:
        (folder / "work").mkdir()
        (folder / "root").mkdir()
        token = secrets.token_hex(16)
        job: Job = {
            "program": program.encode("utf-8", "replace").decode(),
            "checks": tests,
            "input": stdin,
            "token": token,
            "folder": str(folder / "work"),
            "root": str(folder / "root"),
            "readable": _readable(packages),
            "path": _module_path(packages),
            "walls": [wall for wall in walls if wall != "counts" or _linux() >= COUNTS_SINCE],
            "limits": vars(limits),
            "few_bytes": (limits.file_mb << 20) // FEW_FILES,
            "landlock_abi": LANDLOCK_ABI,
        }
        return _watch(job, folder / "work", limits, report_bytes)


def _watch(job: Job, folder: Path, limits: Limits, report_bytes: int) -> Ran:
    with tempfile.TemporaryFile() as file:
        file.write(marshal.dumps(cast(dict[str, Any], job)))
        file.seek(0)
        reports, their_reports = os.pipe()
        mailbox, their_mailbox = socket.socketpair()
        environment = {
            "PYTHONHASHSEED": "0",
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin",
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", _CHILD, str(their_reports), str(their_mailbox.fileno())],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[their_reports, their_mailbox.fileno()],
            env={**environment, "HOME": str(folder), "TMPDIR": str(folder)},
            start_new_session=True,
        )
        os.close(their_reports)
        their_mailbox.close()
    try:
        with Counts(mailbox, process.pid, limits.max_threads, FEW_FILES, limits.kernel_bytes) as counts:
            ended, stdout, report = _read(process, reports, counts, limits, report_bytes)
    finally:
        _kill(process)
        if process.stdout is not None:
            process.stdout.close()
        os.close(reports)
    messages = list(_messages(report))
    walls: dict[str, bool] = next((m["walls"] for m in messages if "walls" in m), {})
    count = 1 if job["checks"] is None else job["checks"]["count"]
    results = [m.get("result") for m in messages if m.get("token") == job["token"]]
    calls = sum(kind == "call" for kind, _ in (job["checks"]["steps"] if job["checks"] else ()))  # the first steps
    if len(results) > count + 1 or not all(type(result) is bool for result in results[calls:]):
        results = []  # the program has written results too
    if ended == "done" and results[count:] != [True]:
        ended = "died"
    return Ran(ended, stdout.decode("utf-8", "replace"), results[:count], walls)


def _read(
    process: subprocess.Popen[bytes], reports: int, counts: Counts, limits: Limits, report_bytes: int
) -> tuple[str, bytes, bytes]:
    """Read the program's output and reports, and answer its counted calls, until it ends or reaches a limit."""
    deadline = time.monotonic() + limits.seconds
    assert process.stdout is not None, "the process writes to a pipe"
    output = process.stdout.fileno()
    texts = {output: b"", reports: b""}
    unread = set(texts)
    with selectors.DefaultSelector() as selector:
        for descriptor in (*texts, counts.fileno()):
            selector.register(descriptor, selectors.EVENT_READ)
        while unread:
            left = deadline - time.monotonic()
            if left <= 0:
                return "time", texts[output], texts[reports]
            for key, _ in selector.select(left):
                if key.fd == counts.fileno():
                    more = counts.answer()
                    if not more or key.fd != counts.fileno():  # the listener has replaced the mailbox
                        selector.unregister(key.fd)
                    if more and key.fd != counts.fileno():
                        selector.register(counts.fileno(), selectors.EVENT_READ)
                    continue
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fd)
                    unread.remove(key.fd)
                texts[key.fd] += data
            if len(texts[output]) > limits.output_kb << 10 or len(texts[reports]) > report_bytes:
                return "output", texts[output], texts[reports]
    return "done", texts[output], texts[reports]


def _messages(report: bytes) -> Iterator[dict[str, Any]]:
    """Parse the process's reports. The program can write to the same descriptor, so any bytes may be in between."""
    for line in report.splitlines():
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(message, dict):
            yield message


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _linux() -> tuple[int, int]:
    """Return the version of the running kernel."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    assert release is not None, f"Linux release {os.uname().release} starts with two numbers"
    return int(release[1]), int(release[2])


@cache
def _module_path(packages: bool) -> list[str]:
    """Return the import path of programs: the standard library and, with `packages`, the packages installed beside this
    one."""
    paths = sysconfig.get_paths()
    standard = [paths["stdlib"], paths["platstdlib"], str(Path(paths["stdlib"]) / "lib-dynload")]
    return list(dict.fromkeys(standard + ([paths["purelib"], paths["platlib"]] if packages else [])))


@cache
def _readable(packages: bool) -> list[str]:
    """Return the files that Python needs to run."""
    prefixes = [sys.base_prefix, *_module_path(packages), sysconfig.get_config_var("LIBDIR") or "/usr/lib"]
    system = "/usr/lib /usr/lib64 /lib /lib64 /usr/local/lib /usr/share/zoneinfo /etc/ld.so.cache /etc/localtime"
    own = [p for p in prefixes if p not in ("/", "/usr")]
    readable = [*own, *system.split(), "/dev/null", "/dev/urandom", "/dev/random"]
    return [p for p in dict.fromkeys(readable) if os.path.exists(p)]


# ----------------------------------------------------------------------------------------------------------- guarantees

_HARMLESS = """
import json, threading
thread = threading.Thread(target=list)
thread.start()
thread.join()
"""
# Programs that try to break a guarantee, separated by lines of dashes.
_ATTEMPTS = """
# no network
import socket
socket.create_connection(("127.0.0.1", {port}), timeout=2)
---
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {port}))
# no file outside its folder
import os
os.listdir("/proc")
---
open({path!r}, "w").write("x")
# no other process
import os
if os.fork() == 0:
    os._exit(0)
---
import os
os.kill({pid}, 0)
---
import fcntl, os
fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {pid})
# bounded memory
block = bytearray(512 << 20)
---
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_long, [ctypes.c_long] * 6
libc.munmap.argtypes = [ctypes.c_long] * 2
pages = []
while len(pages) <= {kernel_bytes} >> 13 and -1 not in pages[-1:]:
    pages.append(libc.mmap(1 << 44 | len(pages) << 30, 4096, 3, 0x22, -1, 0))
for page in pages:
    libc.munmap(page, 4096)
assert -1 not in pages
---
import mmap
block = mmap.mmap(-1, 1 << 20)
---
import ctypes
assert ctypes.CDLL(None).close_range(1000, 1000, 2) == 0
---
import ctypes, os
page = ctypes.create_string_buffer(1)
assert ctypes.CDLL(None).vmsplice(os.pipe()[1], (ctypes.c_void_p * 2)(ctypes.addressof(page), 1), 1, 0) == 1
# bounded files
import os
written, descriptors = 0, []
try:
    for _ in range(40):
        descriptors.append(os.open("x", os.O_CREAT | os.O_RDWR))
        os.unlink("x")
        written += os.write(descriptors[-1], bytes(1 << 16))
except OSError:
    pass
for descriptor in descriptors:
    os.close(descriptor)
assert written > {file_mb} << 20
---
import os
for number in range({max_files} + 1):
    os.mkdir(str(number))
# bounded threads
import threading
threading.stack_size(1 << 16)
stop = threading.Event()
try:
    for _ in range({max_threads}):
        threading.Thread(target=stop.wait).start()
finally:
    stop.set()
"""


def missing_guarantees(walls: tuple[str, ...] = WALLS) -> dict[str, str]:
    """Try to break each sandbox guarantee here. Returns guarantee -> the program that broke it; empty when all hold.

    ValueError when not even a harmless program runs."""
    limits = Limits(seconds=20.0, memory_mb=256, file_mb=1, kernel_mb=4)
    harmless = run(_HARMLESS, limits, tests=["pass"], walls=walls)
    if harmless.passed != [True]:
        raise ValueError(f"code_execution: not even a harmless program runs in the sandbox: {harmless}")
    with temporary_folder("megagrpo_code_") as outside, socket.create_server(("127.0.0.1", 0)) as server:
        facts = {"port": server.getsockname()[1], "path": str(outside / "x"), "pid": os.getpid()}
        facts |= {**vars(limits), "kernel_bytes": limits.kernel_bytes}
        tried = [
            (guarantee, program.format(**facts))
            for guarantee, programs in re.findall(r"^# (.*)\n([^#]*)", _ATTEMPTS, re.MULTILINE)
            for program in programs.split("---\n")
        ]
        if run("", limits, [text for _, text in tried], walls=walls).passed == [False] * len(tried):
            return {}
        return {name: text.strip() for name, text in tried if run("", limits, [text], walls=walls).passed != [False]}
