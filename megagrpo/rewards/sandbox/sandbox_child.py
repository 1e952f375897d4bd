"""The process that runs a completion's program: `python -I -S child.py REPORTS MAILBOX`, started by `sandbox.run`.

It reads a job (marshal) from standard input, puts up the walls that the kernel offers, reports them and the results of
tests (JSON) on the descriptor REPORTS, and executes the program. It imports nothing of this project but `execution` and
`system_calls`. The walls also hold for what the program imports and for its threads. None of them needs root:

- Landlock: the program can open the job's folder, and Python's own files to read. Where the kernel lacks it, a mount
  namespace does that.
- seccomp: no sockets, no new processes, no signals to others, no tracing, no way around (io_uring, namespaces, memory
  outside of limits).
- user, mount and network namespaces: no network device, and a folder in memory that the kernel limits and removes with
  the process.
- counts: the parent answers each new thread, each call that takes memory of the kernel and, where the folder lies on a
  disk, each new file (seccomp's user notification).
- resource limits: processor time, memory, size of a file, descriptors.
"""

import _socket
import ctypes
import marshal
import os
import resource
import struct
import sys

TYPE_CHECKING = False  # importing `typing`, `re` or `json` would double the start's time
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from megagrpo.rewards.sandbox.sandbox import Job

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE = 1, 38, 41
F_ADD_SEALS, F_SEAL_ALL = 1033, 1 | 2 | 4 | 8  # no more seals, and the length and content stay
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x8000000, 0x10000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
SECCOMP = {"x86_64": 317, "aarch64": 277}  # number of the system call
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER = 1, 8


def succeeded(result: int) -> bool:
    return result == 0


def limit_resources(job: "Job", file_bytes: int) -> None:
    LIBC.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a huge page stays whole while one small page of it is mapped
    limits = {
        resource.RLIMIT_AS: job["limits"]["memory_mb"] << 20,
        resource.RLIMIT_CPU: int(job["limits"]["seconds"]) + 1,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 1024,  # timers too
    }
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


# ----------------------------------------------------------------------------------------------------------- namespaces


def enter_namespaces() -> bool:
    """Enter a user namespace with own mounts, no network devices. Returns False if kernel or container forbids it."""
    uid, gid = os.getuid(), os.getgid()
    if not succeeded(LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWNS)):
        return False
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        # the user stays unmapped, as root without capabilities does: the process has fewer rights, the network is gone
        pass
    return True


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    arguments = (source.encode(), target.encode(), kind and kind.encode(), flags, options and options.encode())
    if not succeeded(LIBC.mount(*arguments)):
        raise OSError(ctypes.get_errno(), "mount", target)


def mount_read_only(job: "Job") -> bool:
    """Mount a new root: the readable files, read-only, and the job's folder, in limited memory. Returns False when that
    fails; an unmapped user, for example, cannot create files in a new file system."""
    try:
        _mount_read_only(job)
    except OSError:
        return False
    return True


def _mount_read_only(job: "Job") -> None:
    root, folder = job["root"], job["folder"]
    mount("none", "/", None, MS_REC | MS_PRIVATE, None)
    mount("tmpfs", root, "tmpfs", 0, "size=1m,mode=755")
    for path in filter(os.path.exists, job["readable"]):
        inside = root + path
        if os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            open(inside, "w").close()
        mount(path, inside, None, MS_BIND, None)
        flags = MS_REMOUNT | MS_BIND | MS_RDONLY
        # A bind mount in a user namespace keeps the flags that are locked on the original: try with the usual ones too.
        locked = (0, 2 | 4, 2 | 4 | 1024, 2 | 4 | 1 << 21, 2 | 1 << 21, 1024, 1 << 21)
        if not any(succeeded(LIBC.mount(None, inside.encode(), None, flags | more, None)) for more in locked):
            raise OSError("a readable file cannot be mounted read-only")
    os.makedirs(root + folder)
    # the folder itself counts as one inode
    limits = f"size={job['limits']['file_mb']}m,nr_inodes={job['limits']['max_files'] + 1},mode=700"
    mount("tmpfs", root + folder, "tmpfs", MS_NOSUID | MS_NODEV, limits)
    mount("none", root, None, MS_REMOUNT | MS_RDONLY, None)
    os.chroot(root)
    os.chdir(folder)


def drop_capabilities() -> None:
    header = struct.pack("Ii", 0x20080522, 0)
    LIBC.capset(header, bytes(24))


# ------------------------------------------------------------------------------------------------------------- Landlock


def restrict_files(job: "Job") -> bool:
    """Restrict file access with Landlock (Linux 5.13): read access to the readable files, full access to the job's
    folder. Returns False where the kernel lacks Landlock."""
    create, add, restrict = 444, 445, 446
    version = min(LIBC.syscall(create, None, ctypes.c_size_t(0), 1), job["landlock_abi"])
    if version < 1:
        return False
    execute, write, read, list_folder = 1, 2, 4, 8
    every = (1 << 13) - 1
    every |= (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)  # move between folders; truncate
    every |= 1 << 15 if version >= 5 else 0  # device ioctls
    network = 3 if version >= 4 else 0  # bind and connect TCP
    attributes = struct.pack("QQQ", every, network, 3 if version >= 6 else 0)  # and abstract sockets, signals
    ruleset = LIBC.syscall(create, attributes, ctypes.c_size_t(8 if version < 4 else 16 if version < 6 else 24), 0)
    if ruleset < 0:
        return False
    rights = {path: read | list_folder | execute for path in job["readable"]} | {job["folder"]: every & ~(1 << 15)}
    for path, allowed in rights.items():
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        of_files = execute | write | read | 1 << 14
        allowed = allowed if os.path.isdir(path) else allowed & of_files
        rule = struct.pack("=Qi", allowed & every, opened)
        failed = not succeeded(LIBC.syscall(add, ruleset, 1, rule, 0))
        os.close(opened)
        if failed:
            return False
    done = succeeded(LIBC.syscall(restrict, ruleset, 0))
    os.close(ruleset)
    return done


# -------------------------------------------------------------------------------------------------------------- seccomp


def filter_calls(calls: "ModuleType", counts: bool, limits_files: bool, mailbox: int) -> tuple[bool, bool]:
    """Install the filters of `system_calls`. With `counts`, send a listener to the parent through `mailbox`, the
    descriptor of a socket.

    Returns whether calls are denied and whether the parent counts. A process has at most one listener, so the parent
    cannot count where a container's runtime already listens. The second filter denies the call that sends the listener,
    so it is installed afterwards.
    """
    machine = os.uname().machine
    if machine not in calls.ARCHITECTURES or sys.maxsize <= 2**32:
        return False, False
    listener = (
        install(calls.pack(calls.build_counter(machine, limits_files)), SECCOMP_FILTER_FLAG_NEW_LISTENER)
        if counts
        else -1
    )
    if listener >= 0:
        channel = _socket.socket(fileno=mailbox)
        channel.sendmsg([b"listener"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", listener))])
        channel.detach()
        os.close(listener)
    denies = calls.pack(calls.build_filter(machine, os.getpid(), listener >= 0, limits_files))
    return succeeded(install(denies)), listener >= 0


def install(instructions: bytes, flags: int = 0) -> int:
    """Install a packed filter. Returns its listener's descriptor, 0 without one, or a negative number on failure."""
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxQ", len(instructions) // 8, ctypes.addressof(buffer))
    return LIBC.syscall(SECCOMP[os.uname().machine], SECCOMP_SET_MODE_FILTER, flags, program)


# ---------------------------------------------------------------------------------------------------------- the program


def feed_input(text: bytes) -> None:
    """Make `text` the program's standard input, which the program cannot change."""
    file = os.memfd_create("input", os.MFD_ALLOW_SEALING)
    os.write(file, text) if len(text) < 65536 else open(file, "wb", closefd=False).write(text)
    os.lseek(file, 0, os.SEEK_SET)
    LIBC.fcntl(file, F_ADD_SEALS, F_SEAL_ALL)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)


def as_json(value: object) -> str:
    """Write a value as JSON, without an import for what tests report."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, str) and value.isalnum() and value.isascii():
        return f'"{value}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_json(key)}: {as_json(item)}" for key, item in value.items()) + "}"
    import json

    return json.dumps(value, default=plain)


def plain(value: object) -> object:
    """Return arrays and numbers of numpy as Python's own, for JSON. Raises TypeError for other objects."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


def main() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    reports, mailbox = map(int, sys.argv[1:])
    job: Job = marshal.load(open(0, "rb", closefd=False))

    def report(
        message: object, write: "Callable[[int, bytes], int]" = os.write, as_json: "Callable[[object], str]" = as_json
    ) -> None:
        left = as_json(message).encode() + b"\n"
        while left:
            left = left[write(reports, left) :]

    os.chdir(job["folder"])
    feed_input(job["input"].encode("utf-8", "replace"))
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # importing the package would import `typing`
    import execution  # type: ignore[import-not-found]  # import now: the files cannot be read once the restrictions are in place
    import system_calls  # type: ignore[import-not-found]

    del sys.modules["execution"], sys.modules["system_calls"]  # a program may have modules of these names
    sys.path[:] = job["path"]
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    requested = job["walls"]
    walls = {"namespaces": "namespaces" in requested and enter_namespaces()}
    walls["mounts"] = walls["namespaces"] and "mounts" in requested and mount_read_only(job)
    drop_capabilities()
    limit_resources(job, job["limits"]["file_mb"] << 20 if walls["mounts"] else job["few_bytes"])
    walls["landlock"] = "landlock" in requested and restrict_files(job)
    walls["seccomp"] = walls["counts"] = False
    if "seccomp" in requested:
        walls["seccomp"], walls["counts"] = filter_calls(
            system_calls, "counts" in requested, not walls["mounts"], mailbox
        )
    os.close(mailbox)
    report({"walls": walls})
    token = job["token"]
    execution.execute(
        job["program"], job["checks"], lambda value: report({"token": token, "result": value}), lambda: os._exit(0)
    )


if __name__ == "__main__":
    main()
