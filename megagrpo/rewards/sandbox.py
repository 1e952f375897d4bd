"""Programs that nobody has read, run where they can do no harm: in a process whose walls the kernel holds up (`sandbox_child`)."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megagrpo.scratch import remove_tree

WALLS = ("namespaces", "mounts", "landlock", "seccomp")
_CHILD = str(Path(__file__).with_name("sandbox_child.py"))
_LOOK_EVERY = 0.05  # seconds between looks at the folder's size


@dataclass(frozen=True)
class Limits:
    """What a program may use. `seconds` are on the clock, processor time is bounded by the next whole number."""

    seconds: float = 5.0
    memory_mb: int = 512
    output_kb: int = 64
    file_mb: int = 16
    max_files: int = 200


@dataclass(frozen=True)
class Ran:
    """How a program ended: `ended` is "done" (also after an exception), "time", "output", "files" or "died".

    `passed` has one entry per test; without tests one that says whether the program ran to its end; empty when it did not come so far.
    `walls` are those that stood."""

    ended: str
    stdout: str
    passed: list[bool]
    walls: dict[str, bool]


def run(
    program: str, limits: Limits, tests: list[str] | None = None, stdin: str = "", walls: tuple[str, ...] = WALLS, packages: bool = True
) -> Ran:
    """Run a Python program, then `tests` (Python too) in the same names, in a folder of its own that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="megagrpo_code_"))
    try:
        (folder / "work").mkdir()
        (folder / "root").mkdir()
        token = secrets.token_hex(16)
        job = {
            "program": program.encode("utf-8", "replace").decode(),
            "tests": None if tests is None else [t.encode("utf-8", "replace").decode() for t in tests],
            "input": stdin,
            "token": token,
            "folder": str(folder / "work"),
            "root": str(folder / "root"),
            "readable": _readable(packages),
            "path": _module_path(packages),
            "walls": list(walls),
            "memory_mb": limits.memory_mb,
            "file_mb": limits.file_mb,
            "cpu_seconds": int(limits.seconds) + 1,
        }
        return _watch(job, folder / "work", limits)
    finally:
        remove_tree(folder)


def _watch(job: dict, folder: Path, limits: Limits) -> Ran:
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(job).encode())
        file.seek(0)
        theirs, ours = _pipe()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", _CHILD, str(theirs)],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs],
            env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(folder)},
            start_new_session=True,
        )
        os.close(theirs)
    try:
        ended, stdout, report = _read(process, ours, folder, limits)
    finally:
        _kill(process)
        process.stdout.close()
        os.close(ours)
    messages = [json.loads(line) for line in report.splitlines() if line.endswith(b"}")]
    walls = next((m["walls"] for m in messages if "walls" in m), {})
    passed = next((m["passed"] for m in messages if m.get("token") == job["token"]), [])
    return Ran("died" if ended == "done" and not passed else ended, stdout.decode("utf-8", "replace"), passed, walls)


def _pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    return writer, reader


def _read(process: subprocess.Popen, channel: int, folder: Path, limits: Limits) -> tuple[str, bytes, bytes]:
    """What the program prints and reports, until it ends or goes too far."""
    deadline = time.monotonic() + limits.seconds
    texts = {process.stdout.fileno(): b"", channel: b""}
    with selectors.DefaultSelector() as selector:
        for descriptor in texts:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return "time", *texts.values()
            for key, _ in selector.select(min(left, _LOOK_EVERY)):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fd)
                texts[key.fd] += data
            if len(texts[process.stdout.fileno()]) > limits.output_kb << 10 or len(texts[channel]) > 1 << 20:
                return "output", *texts.values()
            if _is_too_full(folder, limits):
                return "files", *texts.values()
    return "done", *texts.values()


def _is_too_full(folder: Path, limits: Limits) -> bool:
    size = count = 0
    for path, _, files in os.walk(folder):
        count += 1 + len(files)
        if count > limits.max_files:
            return True
        for name in files:
            try:
                size += os.lstat(os.path.join(path, name)).st_size
            except OSError:
                pass
    return size > limits.file_mb << 20


def _kill(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


@cache
def _module_path(packages: bool) -> list[str]:
    """Where programs import from: the standard library and, with `packages`, what is installed beside this package."""
    paths = sysconfig.get_paths()
    standard = [paths["stdlib"], paths["platstdlib"], str(Path(paths["stdlib"]) / "lib-dynload")]
    return list(dict.fromkeys(standard + ([paths["purelib"], paths["platlib"]] if packages else [])))


@cache
def _readable(packages: bool) -> list[str]:
    """Files that Python needs to run."""
    prefixes = [sys.base_prefix, *_module_path(packages), sysconfig.get_config_var("LIBDIR") or "/usr/lib"]
    system = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime"]
    devices = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"]
    own = [p for p in prefixes if p not in ("/", "/usr")]
    return [p for p in dict.fromkeys(own + system + devices) if os.path.exists(p)]


# ------------------------------------------------------------------------------------------------------------------ guarantees

_TCP = """
import socket
socket.create_connection(("127.0.0.1", {port}), timeout=2)
"""
_UDP = """
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {port}))
"""
_FILES = """
import os
os.listdir("/proc")
"""
_WRITE = """
open({path!r}, "w").write("x")
"""
_PROCESSES = """
import os
if os.fork() == 0:
    os._exit(0)
"""
_SIGNALS = """
import os
os.kill({pid}, 0)
"""
_MEMORY = """
block = bytearray({memory} << 20)
"""
_OWN_FILE = """
open("a.txt", "w").write("x")
assert open("a.txt").read() == "x"
import json, threading
thread = threading.Thread(target=list)
thread.start()
thread.join()
"""


def missing_guarantees(walls: tuple[str, ...] = WALLS) -> dict[str, str]:
    """What this machine's kernel does not keep programs from, tried out: guarantee -> how it was broken. Empty when all hold.

    ValueError when not even a harmless program runs."""
    limits = Limits(seconds=20.0, memory_mb=256)
    harmless = run(_OWN_FILE, limits, tests=["pass"], walls=walls)
    if harmless.passed != [True]:
        raise ValueError(f"code_execution: no program runs here: {harmless}")
    with tempfile.TemporaryDirectory(prefix="megagrpo_code_") as outside, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attempts = {
            "no network": [_TCP.format(port=port), _UDP.format(port=port)],
            "no file outside its folder": [_FILES, _WRITE.format(path=str(Path(outside) / "x"))],
            "no other process": [_PROCESSES, _SIGNALS.format(pid=os.getpid())],
            "bounded memory": [_MEMORY.format(memory=512)],
        }
        tried = [(name, text) for name, texts in attempts.items() for text in texts]
        return {name: text.strip() for name, text in tried if run("", limits, [text], walls=walls).passed != [False]}
