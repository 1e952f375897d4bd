"""The process that a program of a completion runs in: `python -I -S sandbox_child.py FD`, started by `sandbox.run`.

It reads a job (JSON) from standard input, puts up the walls that the kernel offers, reports them and, for tests, their results on FD, and
executes the program. It imports nothing of ours. Every wall holds for what the program starts or imports too, and none of them needs root:

- Landlock: files outside of the job's folder cannot be opened, but for reading Python's own. Where the kernel lacks it: a mount namespace.
- seccomp: no sockets, no new processes, no signals to others, no tracing, no way around (io_uring, namespaces, memory outside of limits).
- user and network namespaces: no network device. Where seccomp is there already this is a second wall.
- resource limits: processor time, memory, size and number of files.
"""

import ctypes
import json
import os
import resource
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x8000000, 0x10000000, 0x40000000
CLONE_THREAD = 0x10000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
EPERM, ENOSYS = 1, 38
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit number, column of the table below
# Denied system calls: (x86_64, aarch64), None where the architecture has no such call.
DENIED = {
    "socket": (41, 198),
    "connect": (42, 203),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "syslog": (103, 116),
    "process_madvise": (440, 440),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # Landlock leaves owners, permissions, times and attributes of files alone, and its first versions their lengths.
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
CLONE, CLONE3, TGKILL, PRLIMIT, PRCTL = (56, 220), (435, 435), (234, 131), (302, 261), (157, 167)


def succeeded(result):
    return result == 0


def limit_resources(job):
    memory, files = job["memory_mb"] << 20, job["file_mb"] << 20
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_FSIZE: files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


# ------------------------------------------------------------------------------------------------------------------ namespaces


def enter_namespaces():
    """A user namespace with no network device, and mounts of its own. False where the kernel or a container forbids it."""
    uid, gid = os.getuid(), os.getgid()
    if not succeeded(LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWNS)):
        return False
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        pass  # unmapped: fewer rights inside, the walls stand all the same
    return True


def mount_read_only(job):
    """Of all files leave the readable ones, read-only, and the job's folder, in a root of their own. False where it cannot be done."""
    root, folder = job["root"], job["folder"]
    mount = LIBC.mount
    if not succeeded(mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)):
        return False
    if not succeeded(mount(b"tmpfs", root.encode(), b"tmpfs", 0, b"size=1m,mode=755")):
        return False
    for path in [*job["readable"], folder]:
        if not os.path.exists(path):
            continue
        inside = root + path
        if os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            open(inside, "w").close()
        if not succeeded(mount(path.encode(), inside.encode(), None, MS_BIND, None)):
            return False
        flags = MS_REMOUNT | MS_BIND | MS_RDONLY
        # A bind mount in a user namespace keeps the flags that are locked on the original: try with the usual ones too.
        locked = (0, 2 | 4, 2 | 4 | 1024, 2 | 4 | 1 << 21, 2 | 1 << 21, 1024, 1 << 21)
        if path != folder and not any(succeeded(mount(None, inside.encode(), None, flags | more, None)) for more in locked):
            return False
    if not succeeded(mount(None, root.encode(), None, MS_REMOUNT | MS_RDONLY, None)):
        return False
    os.chroot(root)
    os.chdir(folder)
    return True


def drop_capabilities():
    header = struct.pack("Ii", 0x20080522, 0)
    LIBC.capset(header, bytes(24))


# -------------------------------------------------------------------------------------------------------------------- Landlock


def restrict_files(job):
    """Landlock (Linux 5.13): read the readable, everything in the job's folder, nothing else. False where the kernel lacks it."""
    create, add, restrict = 444, 445, 446
    version = LIBC.syscall(create, None, ctypes.c_size_t(0), 1)
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


# --------------------------------------------------------------------------------------------------------------------- seccomp


def filter_calls():
    """A seccomp filter that allows what is not in DENIED; threads may be made, processes not. False where it cannot be installed."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES or sys.maxsize <= 2**32:
        return False
    audit, column = ARCHITECTURES[machine]
    load, equal, above, bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    number, architecture, argument = 0, 4, lambda i: 16 + 8 * i

    def deny(error):
        return 0x50000 | error

    code = [(load, 0, 0, architecture), (equal, 1, 0, audit), (give, 0, 0, kill), (load, 0, 0, number)]
    if machine == "x86_64":
        code += [(above, 0, 1, 0x40000000), (give, 0, 0, deny(ENOSYS))]  # x32 has numbers of its own
    for numbers in DENIED.values():
        if numbers[column] is not None:
            code += [(equal, 0, 1, numbers[column]), (give, 0, 0, deny(EPERM))]
    code += [(equal, 0, 1, CLONE3[column]), (give, 0, 0, deny(ENOSYS))]  # its flags lie in memory: the C library falls back to clone
    # A clone must be a thread; a signal must be to a thread of this process, limits its own; the signal of the parent's death stays set.
    code += [
        (equal, 0, 4, CLONE[column]),
        (load, 0, 0, argument(0)),
        (bits, 1, 0, CLONE_THREAD),
        (give, 0, 0, deny(EPERM)),
        (give, 0, 0, allow),
    ]
    code += [
        (equal, 0, 4, TGKILL[column]),
        (load, 0, 0, argument(0)),
        (equal, 1, 0, os.getpid()),
        (give, 0, 0, deny(EPERM)),
        (give, 0, 0, allow),
    ]
    code += [(equal, 0, 4, PRLIMIT[column]), (load, 0, 0, argument(0)), (equal, 1, 0, 0), (give, 0, 0, deny(EPERM)), (give, 0, 0, allow)]
    code += [
        (equal, 0, 4, PRCTL[column]),
        (load, 0, 0, argument(0)),
        (equal, 0, 1, PR_SET_PDEATHSIG),
        (give, 0, 0, deny(EPERM)),
        (give, 0, 0, allow),
    ]
    code += [(give, 0, 0, allow)]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(buffer))
    return succeeded(LIBC.prctl(PR_SET_SECCOMP, 2, program, 0, 0))


# ------------------------------------------------------------------------------------------------------------------ the program


def feed_input(text):
    """Make `text` what the program reads from standard input."""
    file = os.memfd_create("input")
    os.write(file, text) if len(text) < 65536 else open(file, "wb", closefd=False).write(text)
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)


def execute(job, report):
    """Run the program, then each of its tests in the same names. What the tests gave goes to `report`, with the job's token."""
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    ended = None
    try:
        exec(compile(job["program"], "<program>", "exec"), names)
    except SystemExit as error:
        ended = error.code
    if job["tests"] is None:
        sys.stdout.flush()
        report({"token": job["token"], "passed": [ended in (None, 0)]})
        return
    passed = []
    for test in job["tests"]:
        try:
            exec(compile(test, "<test>", "exec"), names)
            passed.append(True)
        except BaseException:
            passed.append(False)
    report({"token": job["token"], "passed": passed})


def main():
    LIBC.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    channel = int(sys.argv[1])
    job = json.load(open(0, "rb", closefd=False))

    def report(message, write=os.write, dumps=json.dumps):
        write(channel, dumps(message).encode() + b"\n")

    os.chdir(job["folder"])
    feed_input(job["input"].encode("utf-8", "replace"))
    sys.path[:] = job["path"]
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    wanted = job["walls"]
    walls = {"namespaces": "namespaces" in wanted and enter_namespaces()}
    walls["mounts"] = walls["namespaces"] and "mounts" in wanted and mount_read_only(job)
    drop_capabilities()
    limit_resources(job)
    walls["landlock"] = "landlock" in wanted and restrict_files(job)
    walls["seccomp"] = "seccomp" in wanted and filter_calls()
    report({"walls": walls})
    execute(job, report)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
