"""Programs in the sandbox: working programs, their scores, and that hostile ones do no harm and end by their
deadline."""

import functools
import os
import socket
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from megagrpo.config import RewardsSection
from megagrpo.rewards.functions import code_execution
from megagrpo.rewards.functions.code_execution import CodeExecution
from megagrpo.rewards.sandbox import sandbox
from megagrpo.rewards.sandbox.sandbox import WALLS, Limits, missing_guarantees, run
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Prompt, Rollout
from tests.unit.for_each import for_each

SHORT, SHORTER = Limits(seconds=4.0, memory_mb=256), Limits(seconds=0.4, memory_mb=256)
LAYERS = {
    "all": WALLS,
    "no namespaces": ("landlock", "seccomp", "counts"),
    "no Landlock": ("namespaces", "mounts", "seccomp", "counts"),
}
GUARANTEES = (
    "no network",
    "no file outside its folder",
    "no other process",
    "bounded memory",
    "bounded files",
    "bounded threads",
)
ADD = "def add(a, b):\n    return a + b\n"
TRAPS = {
    "fork": "import os\nif os.fork() == 0:\n    os._exit(0)",
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "a process of its own": "import subprocess\nsubprocess.run(['true'])",
    "another program": "import os\nos.execv('/bin/true', ['true'])",
    "the trainer's files": "open({secret!r}).read()",
    "a file outside": "open({folder!r} + '/x', 'w')",
    "a file in /tmp": "open('/tmp/megagrpo_escape', 'w')",
    "shared memory": "open('/dev/shm/megagrpo_escape', 'w')",
    "a folder outside": "import os\nos.listdir({folder!r})",
    "other processes": "import os\nos.listdir('/proc')",
    "removing": "import os\nos.remove({secret!r})",
    "permissions": "import os\nos.chmod({secret!r}, 0o777)",
    "permissions of what it may read": "import os, sys\nos.chmod(os.__file__, 0o644)",
    "permissions through a descriptor": "import os\nfile = open(os.__file__)\nos.fchmod(file.fileno(), 0o644)",
    "lengths": "import os\nos.truncate({secret!r}, 0)",
    "times": "import os\nos.utime({secret!r})",
    "links": "import os\nos.link({secret!r}, 'x')",
    "TCP": "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)",
    "UDP": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "a local socket": "import socket\nsocket.socket(socket.AF_UNIX).connect({secret!r})",
    "a signal": "import os\nos.kill({pid}, 0)",
    "a signal to a descriptor's owner": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 8, {pid})",
    "a descriptor's signal": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 10, 9)",
    "a long owner": "import fcntl, os, struct\nfcntl.fcntl(os.pipe()[0], 15, struct.pack('ii', 1, {pid}))",
    "an owner, in 64 bits": "import ctypes\nassert ctypes.CDLL(None).syscall(72, 0, ctypes.c_long(8 | 1 << 32), "
    "ctypes.c_long({pid})) == 0",
    "a socket's owner": "import fcntl, socket, struct\nfcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', "
    "{pid}))",
    "a socket's group": "import fcntl, socket, struct\nfcntl.ioctl(socket.socketpair()[0], 0x8902, struct.pack('i', "
    "{pid}))",
    "a lease on Python's files": "import fcntl, os\nfcntl.fcntl(open(os.__file__), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "attributes of Python's "
    "files": "import fcntl, os, struct\nfcntl.ioctl(open(os.__file__), 0x40086602, struct.pack('l', 0x80))",
    "attributes by a newer call": "import ctypes\nctypes.set_errno(0)\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "libc.syscall(463, 0, 0, 0, 0, 0, 0)\nassert ctypes.get_errno() != 38",
    "a datagram": "import socket\nsocket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', {socket!r})",
    "a filter of its own": "import ctypes\nassert ctypes.CDLL(None).syscall(317, 2, 0, "
    "ctypes.byref(ctypes.c_int(0x7fff0000))) == 0",
    "a call by its x32 number": "import ctypes\nassert ctypes.CDLL(None).syscall(0x40000000 + 39) > 0",
    "a signal to all": "import os\nos.kill(-1, 0)",
    "a parent's signal": "import os\nos.kill(os.getppid(), 0)",
    "memory": "x = bytearray(600 << 20)",
    "more memory": "x = []\nwhile True:\n    x.append(bytearray(1 << 20))",
    "memory without a limit": "import os\nos.memfd_create('x')",
    "memory in a secret area": "import ctypes\nassert ctypes.CDLL(None).syscall(447, 0) >= 0",
    "memory that stays while a page of it is mapped": "import mmap\nmmap.mmap(-1, 1 << 20)",
    "the same through a device": "import mmap, os\nmmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20)",
    "pages kept by a pipe": "import os\nfile = os.open('x', os.O_CREAT | os.O_RDWR)\nos.write(file, b'x' * 9)\n"
    "os.splice(file, os.pipe()[1], 9, 0)",
    "pages kept by a socket": "import os, socket\nfile = os.open('x', os.O_CREAT | os.O_RDWR)\nos.write(file, b'x' * "
    "9)\n"
    "os.sendfile(socket.socketpair()[0].fileno(), file, 0, 9)",
    "pages kept by a second pipe": "import ctypes, os\none, two = os.pipe(), os.pipe()\nos.write(one[1], b'x')\n"
    "assert ctypes.CDLL(None).tee(one[0], two[1], 1, 0) == 1",
    "pages given to a pipe": "import ctypes, os\npage = ctypes.create_string_buffer(1)\n"
    "assert ctypes.CDLL(None).vmsplice(os.pipe()[1], (ctypes.c_void_p * 2)(ctypes.addressof(page), 1), 1, 0) == 1",
    "descriptors of a thread's own": "import ctypes\nassert ctypes.CDLL(None).close_range(1000, 1000, 2) == 0",
    "growth of its input": "import os\nos.pwrite(0, b'x', 1 << 20)",
    "length of its input": "import os\nos.ftruncate(0, 1 << 20)",
    "names of memory": "import ctypes\npage = ctypes.CDLL(None).valloc\npage.restype = ctypes.c_void_p\n"
    "assert ctypes.CDLL(None).prctl(0x53564D41, 0, ctypes.c_void_p(page(4096)), 4096, b'x') == 0",
    "raised limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "a large file": "open('x', 'wb').write(bytes(64 << 20))",
    "a daemon": "import ctypes\nassert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",
    "new namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "io_uring": "import ctypes\nassert ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(200)) >= 0",
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """Targets of a hostile program: a file, a folder, a port, this process."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret").write_text("secret")
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,  # the path of a socket has 107 characters at most
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as local,
    ):
        local.bind(f"{short}/socket")
        port = server.getsockname()[1]
        yield {
            "secret": str(folder / "secret"),
            "folder": str(folder),
            "socket": f"{short}/socket",
            "port": port,
            "pid": os.getpid(),
        }
        assert os.listdir(short) == ["socket"]
    assert (folder / "secret").read_text() == "secret" and os.listdir(folder) == ["secret"]
    assert not Path("/tmp/megagrpo_escape").exists() and not Path("/dev/shm/megagrpo_escape").exists()


made = functools.cache(CodeExecution)  # it tries the sandbox each time


def score(completion, tests=None, expected=None, **options):
    return made(**options)([completion], tests=[tests], expected_output=[expected])[0]


@pytest.fixture(scope="module", autouse=True)
def own_temporary_files(tmp_path_factory) -> Path:
    """A separate folder for these programs' folders, away from other tests running at the same time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("programs")))
        yield Path(tempfile.tempdir)


def left(folder: Path) -> list[str]:
    """Folders of programs below `folder`, and processes of programs that ran there."""
    found = [str(path) for path in folder.rglob("megagrpo_code_*")]
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if str(folder).encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(entry)
        except OSError:
            pass
    return found


@pytest.mark.parametrize("walls", list(LAYERS.values())[1:], ids=list(LAYERS)[1:])
def test_no_program_gets_out(outside, walls):
    traps = ["def trap():\n" + textwrap.indent(trap.format(**outside), "    ") + "\ntrap()" for trap in TRAPS.values()]
    ran = run("", Limits(seconds=20.0, memory_mb=256), tests=traps, walls=walls)
    assert dict(zip(TRAPS, ran.passed, strict=True)) == dict.fromkeys(TRAPS, False), ran


@pytest.mark.parametrize("walls", LAYERS.values(), ids=LAYERS)
def test_every_guarantee_holds_with_either_kind_of_wall(walls):
    assert missing_guarantees(walls) == {}


@pytest.mark.parametrize(
    "walls, missing",
    [
        (("seccomp", "counts"), ["no file outside its folder"]),
        pytest.param(("landlock", "seccomp"), ["bounded memory", "bounded threads"], marks=pytest.mark.full),
        (("landlock",), ["no network", "no other process", "bounded memory", "bounded files", "bounded threads"]),
        pytest.param(
            ("namespaces", "mounts"), ["no other process", "bounded memory", "bounded threads"], marks=pytest.mark.full
        ),
        ((), list(GUARANTEES)),
    ],
    ids=str,
)
def test_a_wall_that_is_missing_is_found_out(walls, missing):
    assert list(missing_guarantees(walls)) == missing


def test_a_guarantee_that_cannot_be_given_is_refused_unless_best_effort_is_asked_for(monkeypatch, caplog):
    monkeypatch.setattr(code_execution, "missing_guarantees", lambda: {"no network": "..."})
    with pytest.raises(ValueError, match=r"lacks guarantees of the sandbox: no network.*args: {sandbox: best_effort}"):
        CodeExecution()
    assert CodeExecution(sandbox="best_effort")(["print(1)"], expected_output=["1"]) == [1.0]
    assert "lacks guarantees of the sandbox: no network" in caplog.text


def test_a_machine_that_runs_nothing_is_named(monkeypatch):
    monkeypatch.setattr(sandbox, "_CHILD", "/no/such/file.py")
    with pytest.raises(ValueError, match="not even a harmless program runs"):
        missing_guarantees()


@pytest.mark.parametrize("options", [{"sandbox": "no"}, {"seconds": 0}, {"memory_mb": -1}])
def test_options_without_a_meaning_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CodeExecution(**options)


@for_each(
    "program, ended",
    [
        ("import time\ntime.sleep(3600)", "time"),
        ("while True:\n    pass", "time"),
        ("import ctypes\nctypes.PyDLL(None).sleep(3600)", "time"),
        ("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True:\n    pass", "time"),
        ("import os\nos.close(1)\nos.close(2)\nwhile True:\n    pass", "time"),
        ("while True:\n    print('x' * 100000)", "output"),
        ("import os\nwhile True:\n    os.write(3, b'x' * 100000)\n    os.write(4, b'x' * 100000)", None),
        ("for i in range(10**9):\n    open(str(i), 'w')", "died"),
        ("for i in range(10**9):\n    open(str(i % 150), 'ab').write(bytes(1 << 20))", "died"),
        ("import os\nos._exit(0)", "died"),
        ("1 / 0", "died"),
        ("raise SystemExit(1)", "done"),
        ("f(" * 300 + ")" * 300, "died"),
        ("(" * 300 + ")" * 300, "died"),
        ("\ud800", "died"),
        ("x = 10**10**10", "time"),
        ("def f():\n    f()\nimport sys\nsys.setrecursionlimit(10**9)\nf()", None),
    ],
)
def test_a_program_ends_by_its_deadline_and_leaves_nothing(program, ended, own_temporary_files):
    begun = time.monotonic()
    ran = run(program, SHORTER if ended in ("time", None) else SHORT)
    assert time.monotonic() - begun < SHORT.seconds + 3
    assert ran.passed != [True] and ended in (ran.ended, None)
    assert not left(own_temporary_files)


def test_a_program_may_use_threads_files_of_its_own_and_installed_packages():
    program = (
        "import threading, json, numpy\nopen('a', 'w').write('x')\nt = threading.Thread(target=print, "
        "args=(open('a').read(),))"
    )
    program += "\nt.start()\nt.join()"
    assert run(program, Limits()).stdout == "x\n"
    assert run("import numpy", Limits(), packages=False).passed == [] and run(
        "import json", Limits(), packages=False
    ).passed == [True]


def test_a_program_has_no_huge_pages():
    # PR_GET_THP_DISABLE
    assert run("import ctypes\nprint(ctypes.CDLL(None).prctl(42, 0, 0, 0, 0))", SHORT, walls=()).stdout == "1\n"


def test_a_program_may_use_asyncio_sqlite_numpy_maps_of_its_input_and_much_memory_in_parts():
    programs = {
        "import asyncio\nasync def one(): return 1\nfor _ in range(50): asyncio.run(one())\nprint(1)": "1",
        "import sqlite3\nbase = sqlite3.connect('x.db')\nbase.execute('create table t (a)')\nfor i in range(50):\n"
        "    base.execute('insert into t values (1)')\n    base.commit()\nprint(base.execute('select sum(a) from "
        "t').fetchone()[0])": "50",
        "import mmap\nprint(mmap.mmap(0, 0, access=mmap.ACCESS_READ)[:5].decode())": "input",
        "import numpy as np\na = np.ones((1000, 1000))\nfor _ in range(20): a = a @ "
        "np.eye(1000)\nprint(int(a.sum()))": "1000000",
        "kept = [bytes(1 << 18) for _ in range(800)]\nfor _ in range(20): kept[::2] = [bytes(1 << 18) for _ in "
        "range(400)]\nprint(1)": "1",
        "import os, shutil\nopen('a', 'wb').write(b'x' * 99999)\nprint(os.path.getsize(shutil.copyfile('a', "
        "'b')))": "99999",
    }
    for program, printed in programs.items():
        ran = run(program, Limits(seconds=20.0), stdin="input of the program")
        assert (ran.stdout, ran.passed) == (printed + "\n", [True]), program


def test_python_tests_run_after_the_program():
    assert score(f"Here:\n```python\n{ADD}```\nDone.", "assert add(1, 2) == 3") == 1.0
    assert score(f"```python\n{ADD}```", ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]) == 0.0
    assert score(f"```python\n{ADD}```", ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], partial=True) == 0.5
    assert score(ADD + "import sys\nsys.exit()", '["assert add(1, 2) == 3"]') == 1.0
    assert score("no code at all", "assert add(1, 2) == 3") == 0.0


def test_output_is_compared_outside_of_the_program():
    pairs = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}]
    program = "```\na, b = map(int, input().split())\nprint(a + b, end='  ')\n```"
    assert score(program, pairs) == 1.0
    assert score(program, {"inputs": ["1 2", ["1 1"]], "outputs": ["3", "3"]}, partial=True) == 0.5
    assert score("print('a')\nprint('b')", expected="a\nb\n") == 1.0 and score("print('a b')", expected="a\nb") == 0.0
    assert score("print(3)\nraise SystemExit(1)", expected="3") == 0.0
    assert score("import os\nprint(3, flush=True)\nos._exit(0)", expected="3") == 0.0  # it never reached its end
    assert score("print(1)") is None and score("print(1)", "") is None


def test_the_reward_runs_in_a_worker_and_counts_as_any_other(own_temporary_files):
    section = RewardsSection(functions=[{"function": "code_execution", "args": {"seconds": 1.0}}], workers=1)
    columns = {"tests": ["assert add(1, 2) == 3"]}
    deep = "import os\nwhile True:\n    os.mkdir('a')\n    os.chdir('a')"
    texts = [ADD, "while True: pass", "def add(a, b): return 0", deep]
    with RewardScorer(section, 100) as scorer:
        scorer.check_columns(columns)
        scored = scorer.score([Rollout(Prompt(0, (1,), "Q", columns), (1,), (0.0,), "stop", 0, t) for t in texts])
        assert [s.reward for s in scored] == [1.0, 0.0, 0.0, 0.0]
        assert scorer.metrics()["rewards/code_execution/timeouts"] == 0  # the program's own timeout does not count
    assert not left(own_temporary_files)
