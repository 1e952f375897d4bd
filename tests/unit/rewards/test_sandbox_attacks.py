"""Hostile programs against the sandbox: signals, shared memory, disk, threads, folders and forged reports, with each
kind of wall."""

import ctypes
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megagrpo.platform.process.cleanup.scratch import temporary_files
from megagrpo.rewards.functions.code_execution import CodeExecution
from megagrpo.rewards.sandbox import execution, sandbox, system_calls
from megagrpo.rewards.sandbox.counts import Counts
from megagrpo.rewards.sandbox.sandbox import WALLS, Limits, missing_guarantees, run

WITHOUT_NAMESPACES, WITHOUT_LANDLOCK = ("landlock", "seccomp", "counts"), ("namespaces", "mounts", "seccomp", "counts")
EACH = pytest.mark.parametrize(
    "walls", [WALLS, WITHOUT_NAMESPACES, WITHOUT_LANDLOCK], ids=["all", "no namespaces", "no Landlock"]
)
LIMITS = Limits(seconds=20.0, memory_mb=256)
BEFORE_SIGNALS = 5  # the last Landlock ABI that does not restrict signals: Linux 6.11
LIBC = ctypes.CDLL(None, use_errno=True)

# Each makes the kernel send SIGKILL to a process of the same user, without a signal system call.
KILLS = {
    "F_SETOWN": "fcntl.fcntl(end, fcntl.F_SETOWN, {pid})",
    "F_SETOWN_EX": "fcntl.fcntl(end, 15, struct.pack('ii', 1, {pid}))",
    "FIOSETOWN": "fcntl.ioctl(end, 0x8901, struct.pack('i', {pid}))",
    "SIOCSPGRP": "fcntl.ioctl(end, 0x8902, struct.pack('i', {pid}))",
    "F_SETOWN as 64 bits": "ctypes.CDLL(None).syscall(72, end.fileno(), ctypes.c_long(8 | 1 << 32), "
    "ctypes.c_long({pid}))",
}
KILL = """
import ctypes, fcntl, os, socket, struct
end, other = socket.socketpair()
def attempt(action):
    try:
        action()
    except OSError:
        pass
attempt(lambda: {own})
attempt(lambda: fcntl.fcntl(end, 10, 9))
attempt(lambda: fcntl.fcntl(end, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK))
other.send(b"x")
"""


@pytest.mark.parametrize("walls", [WITHOUT_NAMESPACES, WITHOUT_LANDLOCK], ids=["no namespaces", "no Landlock"])
def test_no_program_kills_another_process_where_landlock_does_not_restrict_signals(walls, monkeypatch):
    monkeypatch.setattr(sandbox, "LANDLOCK_ABI", BEFORE_SIGNALS)
    with subprocess.Popen(["sleep", "60"]) as victim:
        try:
            for own in KILLS.values():
                assert run(KILL.format(own=own.format(pid=victim.pid)), LIMITS, walls=walls).ended == "done"
                assert victim.poll() is None, own
        finally:
            victim.kill()


def test_the_start_check_finds_out_that_a_program_can_make_the_kernel_signal_others(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "LANDLOCK_ABI", BEFORE_SIGNALS)
    assert missing_guarantees(WITHOUT_NAMESPACES) == {}
    folder = Path(execution.__file__).parent
    for name in ("execution.py", "sandbox_child.py"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    source = Path(system_calls.__file__).read_text()
    (tmp_path / "system_calls.py").write_text(source.replace("SENDS_SIGNALS = (8, 10, 15)", "SENDS_SIGNALS = ()"))
    monkeypatch.setattr(sandbox, "_CHILD", str(tmp_path / "sandbox_child.py"))
    missing = missing_guarantees(WITHOUT_NAMESPACES)
    assert list(missing) == ["no other process"] and "F_SETOWN" in missing["no other process"]


def test_no_program_truncates_what_it_may_read_where_landlock_does_not_restrict_lengths(tmp_path, monkeypatch):
    file = tmp_path / "readable.py"
    file.write_text("text")
    monkeypatch.setattr(sandbox, "LANDLOCK_ABI", 1)
    monkeypatch.setattr(sandbox, "_readable", lambda packages, of=sandbox._readable: [*of(packages), str(file)])
    attack = (
        f"import os\nassert open({str(file)!r}).read() == 'text'\nopened = 1\nos.open({str(file)!r}, os.O_RDONLY "
        f"| os.O_TRUNC)"
    )
    assert run(attack, LIMITS, ["assert opened"], walls=WITHOUT_NAMESPACES).passed == []
    assert file.read_text() == "text"


def test_no_program_reaches_shared_memory_queues_or_semaphores_of_others_without_namespaces():
    ids = [LIBC.shmget(0, 4096, 0o1600), LIBC.msgget(0, 0o1600), LIBC.semget(0, 1, 0o1600)]
    assert min(ids) >= 0
    LIBC.shmat.restype = ctypes.c_void_p
    address = LIBC.shmat(ids[0], None, 0)
    ctypes.memset(address, 7, 4096)
    attacks = [
        f"address = libc.shmat({ids[0]}, None, 0)\nassert address not in (None, 2**64 - 1)\nctypes.memset(address, 0, "
        f"4096)",
        f"assert libc.shmctl({ids[0]}, 0, None) == 0",
        f"assert libc.msgctl({ids[1]}, 0, None) == 0",
        f"assert libc.msgsnd({ids[1]}, bytes([1] * 16), 8, 0o4000) == 0",
        f"assert libc.semctl({ids[2]}, 0, 0) == 0",
        f"assert libc.semop({ids[2]}, bytes([0, 0, 1, 0, 0, 0]), 1) == 0",
        f"assert libc.semtimedop({ids[2]}, bytes([0, 0, 1, 0, 0, 0]), 1, None) == 0",
        "assert libc.mq_open(b'/megagrpo', 0o102, 0o600, None) >= 0",
        "assert libc.mq_unlink(b'/megagrpo') == 0 or ctypes.get_errno() == 2",
    ]
    program = "import ctypes\nlibc = ctypes.CDLL('librt.so.1', use_errno=True)\nlibc.shmat.restype = ctypes.c_void_p"
    try:
        assert run(program, LIMITS, attacks, walls=WITHOUT_NAMESPACES).passed == [False] * len(attacks)
        assert ctypes.string_at(address, 4096) == bytes([7]) * 4096
    finally:
        LIBC.shmdt(ctypes.c_void_p(address))
        removed = LIBC.shmctl(ids[0], 0, None), LIBC.msgctl(ids[1], 0, None), LIBC.semctl(ids[2], 0, 0)
    assert removed == (0, 0, 0)


# Machine code for x86-64: getpid by the i386 numbers (int 0x80), whose result comes back in eax.
I386 = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")
assert ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))() > 0
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="machine code for x86-64")
def test_a_program_that_calls_by_i386_numbers_is_killed():
    assert run("", LIMITS, [I386], walls=WITHOUT_NAMESPACES).ended == "died"


DISK = {
    "unlinked files": "file = os.open('x', os.O_CREAT | os.O_RDWR)\n    os.unlink('x')\n    total += os.write(file, "
    "bytes(1 << 20))",
    "space taken at once": "file = os.open(str(i), os.O_CREAT | os.O_RDWR)\n    os.posix_fallocate(file, 0, 1 << 20)\n"
    "    total += 1 << 20\n    os.close(file)",
    "space beyond the end": "file = os.open(str(i), os.O_CREAT | os.O_RDWR)\n    if libc.fallocate(file, 1, 1 << 20, "
    "1 << 20):\n"
    "        break\n    total += 1 << 20\n    os.close(file)",
    "files without a name": "total += os.write(os.open('.', os.O_TMPFILE | os.O_RDWR), bytes(1 << 20))",
    "mapped files": "file = os.open('x', os.O_CREAT | os.O_RDWR)\n    os.unlink('x')\n    os.truncate(file, 1 << "
    "20)\n    maps.append("
    "mmap.mmap(file, 1 << 20))\n    os.close(file)\n    maps[-1].write(bytes(1 << 20))\n    total += 1 << 20",
}


@EACH
@pytest.mark.parametrize("attack", DISK)
def test_a_program_takes_no_more_disk_than_its_limit_by(attack, walls):
    program = (
        "import ctypes, mmap, os\nlibc = ctypes.CDLL(None)\nlibc.fallocate.argtypes = [ctypes.c_int] * 2 + "
        "[ctypes.c_long] * 2\n"
    )
    program += f"maps, total = [], 0\ntry:\n  for i in range(60):\n    {DISK[attack]}\n    print(total, flush=True)\n"
    program += "except OSError:\n    pass"
    printed = run(program, Limits(seconds=20.0, memory_mb=256, file_mb=4), walls=walls).stdout.split()
    assert int(printed[-1] if printed else 0) <= 4 << 20


@EACH
def test_a_program_makes_no_more_files_and_folders_than_its_limit(walls):
    whiteout = "assert ctypes.CDLL(None).renameat2(-100, b'w%d' % number, -100, b'w%d' % (number + 1), 4) == 0"
    makes = [
        whiteout,
        "os.mkdir(name)",
        "os.symlink('x', name)",
        "os.mknod(name)",
        "os.close(os.open(name, os.O_CREAT))",
    ]
    for make in makes:
        program = "import ctypes, os\nos.close(os.open('w0', os.O_CREAT))\ntry:\n  for number in range(400):\n"
        program += f"    name = str(number)\n    {make}\nexcept (OSError, AssertionError):\n    pass\n"
        made = run(program + "print(len(os.listdir('.')))", LIMITS, walls=walls).stdout
        assert 0 < int(made) <= LIMITS.max_files, make


@EACH
def test_a_program_has_no_more_threads_than_its_limit(walls):
    program = (
        "import threading\nthreading.stack_size(1 << 16)\nstop = threading.Event()\ndef spawn():\n    try:\n    "
        "    while True:\n"
    )
    program += (
        "            threading.Thread(target=(spawn, stop.wait)[len(started) > 9]).start()\n            "
        "started.append(1)\n"
    )
    program += "    except RuntimeError:\n        stop.wait()\nstarted = []\nthreading.Thread(target=spawn).start()\n"
    program += "import time\ntime.sleep(0.5)\nprint(threading.active_count(), flush=True)\nstop.set()"
    patient = dataclasses.replace(LIMITS, seconds=60.0)  # threads start slowly on a loaded machine
    assert 8 < int(run(program, patient, walls=walls).stdout) <= LIMITS.max_threads


def test_on_a_linux_that_cannot_count_the_start_check_says_that_memory_and_threads_are_not_bounded(monkeypatch):
    monkeypatch.setattr(sandbox, "COUNTS_SINCE", (99, 0))
    assert list(missing_guarantees(WITHOUT_LANDLOCK)) == ["bounded memory", "bounded threads"]
    assert run("open('x', 'w').write('x')", LIMITS).passed == [True]
    assert run("open('x', 'w').write('x')", LIMITS, walls=WITHOUT_NAMESPACES).ended == "died"


def test_a_program_may_start_many_threads_one_after_the_other():
    program = (
        "import threading\nfor _ in range(200):\n    thread = threading.Thread(target=len, args=('',))\n    "
        "thread.start()\n"
    )
    program += "    thread.join()"
    assert run(program, LIMITS).passed == [True]


DEEP = "import os\nwhile True:\n    os.mkdir('a')\n    os.chdir('a')"


@EACH
def test_folders_nested_without_end_cost_the_program_its_own_sample_only(walls, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as around:
        monkeypatch.setenv("TMPDIR", around)
        monkeypatch.setattr(tempfile, "tempdir", None)
        with temporary_files() as folder:
            assert run(DEEP, LIMITS, walls=walls).ended == "died"
            assert run("print(1)", LIMITS, walls=walls).passed == [True]
            assert [entry.name for entry in folder.iterdir()] == [".lock"]
        with temporary_files():
            pass
        assert not os.listdir(around)


# Drops root's capabilities permanently: the process then has any user's rights.
ANY_USER = """
import ctypes, sys
libc = ctypes.CDLL(None)
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
import os
from megagrpo.rewards.sandbox.counts import Counts
from megagrpo.rewards.sandbox.sandbox import WALLS, Limits, missing_guarantees, run
"""
ROOT = Path(__file__).parents[3]


def as_any_user(program: str, folder: Path) -> str:
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ANY_USER + program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_folders_without_permissions_are_removed_for_any_user(tmp_path):
    attack = "import os\nos.umask(0o777)\nos.mkdir('a')\nos.mkdir('b')"
    told = as_any_user(
        f"for walls in (WALLS, {WITHOUT_NAMESPACES}):\n    print(run({attack!r}, Limits(), walls=walls).passed)",
        tmp_path,
    )
    assert told == "[True]\n[True]\n" and not list(tmp_path.iterdir())


def test_root_without_capabilities_has_every_guarantee(tmp_path):
    assert (
        as_any_user("print(missing_guarantees())\nprint(run('', Limits()).walls['seccomp'])", tmp_path) == "{}\nTrue\n"
    )


FORGE = """
import os, sys
frame = sys._getframe()
while frame and "token" not in frame.f_locals.get("job", ()):
    frame = frame.f_back
write, token = frame.f_locals["report"], frame.f_locals["job"]["token"]
reports = frame.f_locals["reports"]
{reports}
os._exit(0)
"""


FORGED = ["1000", "[True]", "1", "'abc'", "{'a': 1}", "None"]


@pytest.mark.parametrize("result", FORGED)
def test_a_forged_result_of_a_test_that_is_not_a_boolean_gives_nothing(result):
    forged = FORGE.format(reports=f"for _ in range(4):\n    write({{'token': token, 'result': {result}}})")
    assert run(forged, LIMITS, tests=["assert False"] * 3).passed == []


def test_a_program_that_reports_beside_the_harness_gives_nothing_and_noise_in_its_reports_is_harmless():
    forged = FORGE.format(reports="write({'token': token, 'result': True})").replace("os._exit(0)", "")
    assert run(forged, LIMITS, tests=["assert False"]).passed == []
    lines = r"b'{bad}', b'[' * 9999 + b'}', b'[1]', b'{}', b'\xff}', b'{\"token\": 1}'"
    noise = FORGE.format(reports=f"for line in ({lines}):\n    os.write(reports, line + b'\\n')").replace(
        "os._exit(0)", ""
    )
    assert run(noise, LIMITS, tests=["pass", "assert False"]).passed == [True, False]


def test_with_partial_a_forged_report_scores_0():
    rewarded = CodeExecution(partial=True)
    forged = FORGE.format(reports="for _ in range(3):\n    write({'token': token, 'result': 1000})")
    assert rewarded([f"{forged}\ndef add(): pass"], tests=[["assert add() == 1", "assert add() == 2"]]) == [0.0]


# ------------------------------------------------------------------------------- the filter, instruction by instruction


def decide(code, audit, number, arguments=()):
    """The return value of a filter of these instructions for a call: a naive version of the kernel's interpreter."""
    words = {0: number, 4: audit} | {16 + 8 * i: value & 0xFFFFFFFF for i, value in enumerate(arguments)}
    value, at = 0, 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        if operation == 0x20:
            value = words.get(operand, 0)
        elif operation == 0x54:
            value &= operand
        elif operation == 0x06:
            return operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[operation]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", system_calls.ARCHITECTURES)
@pytest.mark.parametrize("counts", [True, False])
def test_the_filter_decides_as_its_table_says_on(machine, counts):
    audit, column = system_calls.ARCHITECTURES[machine]
    fails, allow = system_calls.fail, system_calls.ALLOW
    code = system_calls.build_filter(machine, 77, counts, limits_files=True)
    counter = system_calls.build_counter(machine, limits_files=True)
    free = (
        system_calls.build_filter(machine, 77, counts, limits_files=False),
        system_calls.build_counter(machine, limits_files=False),
    )
    for filter in (code, counter, *free):
        assert len(filter) < 4096 and all(0 <= jump < 256 for _, *jumps, _ in filter for jump in jumps)

    def of(call, *arguments, filters=(code, counter)):
        denied, counted = (decide(filter, audit, call[column], arguments) for filter in filters)
        return denied if denied != allow or not counts else counted

    numbers = [numbers[column] for numbers in system_calls.DENIED.values() if numbers[column] is not None]
    assert len(set(numbers)) == len(numbers)
    assert {decide(code, audit, number) for number in numbers} == {fails(1)}
    assert decide(code, audit + 1, 0) == system_calls.KILL
    assert {decide(code, audit, number) for number in (463, 0x40000000, 0x4000003E, 0xFFFFFFFF)} == {fails(38)}
    counted = system_calls.COUNT if counts else fails(122)
    for numbers in system_calls.CREATES.values():
        if numbers[column] is not None:
            assert of(numbers) == counted and of(numbers, filters=free) == allow
    for flags, action in (
        (0, allow),
        (0o2, allow),
        (0o102, counted),
        (0x410002, counted),
        (0o1001, allow),
        (0o1102, counted),
    ):
        assert of(system_calls.OPENAT, 0, 0, flags) == action
    assert of(system_calls.OPENAT, 0, 0, 0o1000) == fails(1)
    assert of(system_calls.OPENAT, 0, 0, 0o102, filters=free) == allow and of(
        system_calls.OPENAT, 0, 0, 0o1000, filters=free
    ) == fails(1)
    asked = system_calls.COUNT if counts else allow
    assert of(system_calls.CLONE, 0x10400) == asked and {
        of(system_calls.CLONE, flags) for flags in (0x10000, 0x411)
    } == {fails(1)}
    mappings = system_calls.MUNMAP, system_calls.MREMAP, system_calls.MPROTECT
    assert {of(call, 0, 4096) for call in mappings} == {of(system_calls.MMAP, 0, 4096, 3, 0x22)} == {asked}
    assert {of(system_calls.MMAP, 0, 4096, 3, flags) for flags in (0x21, 0x23, 0x4031)} == {fails(1)}
    assert of(system_calls.MADVISE, 0, 4096, 4) == allow and of(system_calls.MADVISE, 0, 4096, 14) == fails(0)
    assert of(system_calls.CLOSE_RANGE, 3, 9, 0) == allow and of(system_calls.CLOSE_RANGE, 3, 9, 6) == fails(1)
    assert {of(system_calls.FCNTL, 0, command) for command in (6, 7, 37, 38)} == {
        system_calls.COUNT if counts else fails(1)
    }
    assert {of(system_calls.FCNTL, 0, command) for command in (8, 8 | 1 << 32, 10, 15, 1024, 1031)} == {fails(1)}
    assert {of(system_calls.FCNTL, 0, command) for command in (1, 3, 1030)} == {allow}
    assert {
        of(system_calls.IOCTL, 0, command) for command in (0x8901, 0x8902, 0x8901 | 1 << 32, 0x40086602, 0x5412)
    } == {fails(25)}
    assert of(system_calls.IOCTL, 0, 0x5401) == allow
    for domain, kind, action in (
        (1, 1, asked),
        (1, 0x80801, asked),
        (1, 2, fails(1)),
        (1, 5, fails(1)),
        (2, 1, fails(1)),
    ):
        assert of(system_calls.SOCKETPAIR, domain, kind) == action
    for option, action in ((1, fails(22)), (22, fails(22)), (62, fails(22)), (0x53564D41, fails(22)), (15, allow)):
        assert of(system_calls.PRCTL, option) == action
    assert of(system_calls.RENAMEAT2, 0, 0, 0, 0, 4) == fails(1) and of(system_calls.RENAMEAT2, 0, 0, 0, 0, 1) == allow
    assert of(system_calls.TGKILL, 77) == allow and of(system_calls.TGKILL, 78) == fails(1)


@EACH
def test_a_program_takes_no_memory_in_buffers_of_the_kernel_beside_its_limit(walls):
    program = """
import array, fcntl, os, socket
total, kept = 0, []
def fill(end):
    global total
    os.set_blocking(end, False)
    try:
        while True:
            total += os.write(end, bytes(65536))
    except BlockingIOError:
        pass
def attempt(action):
    try:
        action()
    except OSError:
        pass
try:
    for _ in range(10):
        kept.append(os.pipe())
        attempt(lambda: fcntl.fcntl(kept[-1][1], 1031, 1 << 20))
        fill(kept[-1][1])
    first, last = socket.socketpair()
    for _ in range(40):
        one, other = socket.socketpair()
        attempt(lambda: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30))
        fill(one.fileno())
        attempt(lambda: first.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [other.fileno()]))]))
        kept += (one, other)
except OSError:
    pass
print(total >> 20)
"""
    default = int(Path("/proc/sys/net/core/wmem_default").read_text())
    assert int(run(program, LIMITS, walls=walls).stdout) <= 1 + (64 * default >> 20)


SEND_BUFFER = socket.socket(socket.AF_UNIX).getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
# Each prints how many it has, and each takes at least BYTES of the kernel.
KERNEL_MEMORY = {
    "pages far from each other": (8192, "assert map(1 << 44 | count << 30, 4096, 3) != -1"),
    "pages with holes between them": (
        4096,
        "at = map(0, 4 << 20, 3)\n    assert at != -1 and unmap(at + 4096, (4 << 20) - 4096) == 0",
    ),
    "pages with other rights than their neighbours": (256, "assert protect(whole + 8192 * count, 4096, 3) == 0"),
    "pages of a heap with holes": (4096, "at = more(1 << 21)\n    assert at > 0 and unmap(at, (1 << 21) - 4096) == 0"),
    "locks": (192, "file = files[count % 16]\n    fcntl.fcntl(file, 6, struct.pack('hhqqi4x', 1, 0, 2 * count, 1, 0))"),
    "locks of an open file": (
        192,
        "file = files[count % 16]\n    fcntl.fcntl(file, 37, struct.pack('hhqqi4x', 1, 0, 2 * count, 1, 0))",
    ),
    "socket pairs": (
        2 * socket.socket(socket.AF_UNIX).getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
        "files.append(socket.socketpair())",
    ),
}
TAKE = """
import ctypes, fcntl, os, socket, struct
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_long, [ctypes.c_long] * 6
libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_long, [ctypes.c_long]
unmap, protect = libc.munmap, libc.mprotect
unmap.argtypes, protect.argtypes = [ctypes.c_long] * 2, [ctypes.c_long] * 3
map, more = lambda at, length, rights: libc.mmap(at, length, rights, 0x22, -1, 0), libc.sbrk
whole, files, count = map(0, 160 << 20, 1), [os.open(str(i), os.O_CREAT | os.O_RDWR) for i in range(16)], 0
try:
  while count < 20000:
    {take}
    count += 1
except (AssertionError, OSError):
    pass
os.write(1, str(count).encode())
os._exit(0)
"""


@pytest.mark.parametrize("taken", KERNEL_MEMORY)
def test_a_program_takes_no_more_memory_of_the_kernel_than_its_limit_by(taken):
    limits = Limits(seconds=30.0, memory_mb=256, kernel_mb=1)
    each, take = KERNEL_MEMORY[taken]
    count = int(run(TAKE.format(take=take), limits).stdout)
    assert 0 < count * each <= limits.kernel_bytes


def test_a_mapping_that_grows_takes_the_page_tables_of_its_new_length():
    mailbox, other = socket.socketpair()
    with subprocess.Popen(["sleep", "60"]) as process, other:
        with Counts(mailbox, process.pid, max_threads=1, max_files=1, max_kernel=4 << 20) as counts:
            grown = [counts._decide(process.pid, "MREMAP", [0, 4096, size, 1, 0, 0]) for size in (8192, 1 << 40)]
        process.kill()
    assert grown == [0, system_calls.ENOMEM]
