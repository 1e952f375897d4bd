"""The seccomp filters of a sandboxed program: calls that fail, and calls that the parent counts. The stricter wins.

Numbers are pairs (x86_64, aarch64), None where the architecture has no such call. The kernel reads commands and flags
as 32 bits, so the filter compares the low 32 bits of an argument. Calls of other ABIs of the same machine (i386, x32,
32-bit ARM) kill the process or fail.
"""

import struct

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit number, column of the tables below
NEWEST = 462  # the newest call in these tables; later calls fail as on an older kernel
Numbers = tuple[int | None, int | None]


def _table(text: str) -> dict[str, Numbers]:
    """Read `name x86_64 aarch64, ...`, with "-" where the architecture has no such call. Lines with # are comments."""
    table: dict[str, Numbers] = {}
    for line in text.splitlines():
        for entry in [] if "#" in line else line.split(","):
            if words := entry.split():
                first, second = (None if number == "-" else int(number) for number in words[1:])
                table[words[0]] = first, second
    return table


DENIED = _table("""
    # network; buffers of sockets lie outside a process's memory: none is enlarged, and no descriptor waits in one
    socket 41 198, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242,
    setsockopt 54 208, sendmsg 46 211, sendmmsg 307 269,
    # processes, signals, tracing
    fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, kill 62 129, tkill 200 130, rt_sigqueueinfo 129 138,
    rt_tgsigqueueinfo 297 240, pidfd_open 434 434, pidfd_send_signal 424 424, pidfd_getfd 438 438,
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440,
    migrate_pages 256 238, move_pages 279 239, setpriority 141 140, sched_setaffinity 203 122,
    sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274, ioprio_set 251 30,
    # ways around the walls
    seccomp 317 277, landlock_create_ruleset 444 444, unshare 272 97, setns 308 268, mount 165 40,
    umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428, move_mount 429 429, fsopen 430 430,
    open_by_handle_at 304 265, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
    io_uring_setup 425 425, io_setup 206 0,
    # a pipe or a socket would keep pages that the program has unmapped or cut off, a huge page for each byte
    vmsplice 278 75, splice 275 76, tee 276 77, sendfile 40 71,
    # each splits mappings, or makes memory that the parent does not see
    mbind 237 235, set_mempolicy_home_node 450 450, pkey_mprotect 329 288, remap_file_pages 216 234,
    map_shadow_stack 453 453, memfd_create 319 279, memfd_secret 447 447,
    # System V and POSIX objects outlive the process and are shared; an id is enough to reach one that exists
    shmget 29 194, shmat 30 196, shmctl 31 195, shmdt 67 197, msgget 68 186, msgsnd 69 189, msgrcv 70 188,
    msgctl 71 187, semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192, mq_open 240 180,
    mq_unlink 241 181, mq_timedsend 242 182, mq_timedreceive 243 183, mq_notify 244 184, mq_getsetattr 245 185,
    # other state of the machine or the user
    sync 162 81, syncfs 306 267, keyctl 250 219, add_key 248 217, request_key 249 218, fanotify_init 300 262,
    inotify_init 253 -, inotify_init1 294 26, syslog 103 116,
    # what Landlock does not control: owners, permissions, times, attributes, and before ABI 3 lengths
    truncate 76 45, chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55,
    lchown 94 -, fchownat 260 54, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14,
    lremovexattr 198 15, fremovexattr 199 16, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88,
""")
CLONE, CLONE3, TGKILL, PRLIMIT, PRCTL = (56, 220), (435, 435), (234, 131), (302, 261), (157, 167)
FCNTL, IOCTL, SOCKETPAIR, CLOSE_RANGE = (72, 25), (16, 29), (53, 199), (436, 436)
MMAP, MUNMAP, MREMAP, MPROTECT, MADVISE = (9, 222), (11, 215), (25, 216), (10, 226), (28, 233)
OPEN, OPENAT, OPENAT2, FALLOCATE, RENAMEAT2 = (2, None), (257, 56), (437, 437), (285, 47), (316, 276)
CREATES = _table("""
    # a file or folder, always
    creat 85 -, mkdir 83 -, mkdirat 258 34, mknod 133 -, mknodat 259 33, link 86 -, linkat 265 37, symlink 88 -,
    symlinkat 266 36,
""")
# the limit on descriptors holds for one table of the process
CLONE_THREAD, CLONE_FILES, CLOSE_RANGE_UNSHARE = 0x10000, 0x400, 2
PRCTLS = (3, 4, 15, 16, 23, 38, 39)  # dumpable, thread names, capability sets, no new privileges
LOCKS = (6, 7, 37, 38)  # fcntl: F_SETLK, F_SETLKW and those of an open file; no limit counts locks
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20  # together: memory that stays while one page of it is mapped
MADV_DONTNEED, MADV_FREE = 4, 8  # other advice may split mappings: it is ignored
SENDS_SIGNALS = (8, 10, 15)  # fcntl: F_SETOWN, F_SETSIG and F_SETOWN_EX make the kernel signal any process of the user
F_SETLEASE, F_SETPIPE_SZ = 1024, 1031  # delays others who open one of Python's files; takes memory that no limit counts
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
AF_UNIX, SOCK_STREAM, SOCK_TYPES = 1, 1, 0xF
RENAME_WHITEOUT = 4  # leaves a device file under the old name
O_ACCMODE, O_CREAT, O_TRUNC, O_TMPFILE = 0x3, 0x40, 0x200, 0x400000  # the bit of O_TMPFILE that no other flag has
EPERM, ENOMEM, EINVAL, ENOTTY, ENOSYS, EOPNOTSUPP, EDQUOT = 1, 12, 22, 25, 38, 95, 122

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW, KILL, COUNT = 0x7FFF0000, 0x80000000, 0x7FC00000  # COUNT: the parent answers the call (SECCOMP_RET_USER_NOTIF)
Code = list[tuple[int, int, int, int]]  # instructions: code, jump if true, jump if false, value


def fail(error: int) -> int:
    """Return the action that makes a call fail with `error`."""
    return 0x50000 | error


def build_counter(machine: str, limits_files: bool) -> Code:
    """Build the filter that lets the parent answer each new thread, the calls that take kernel memory (mappings, locks,
    socket pairs) and, with `limits_files`, each call that can create a file."""
    audit, column = ARCHITECTURES[machine]
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), _give(ALLOW), (_LOAD, 0, 0, 0)]
    for numbers in (CLONE, MMAP, MUNMAP, MREMAP, MPROTECT, SOCKETPAIR):
        code += _call(numbers[column], [_give(COUNT)])
    code += _call(
        FCNTL[column],
        [_argument(1), *(step for c in LOCKS for step in ((_EQUAL, 0, 1, c), _give(COUNT))), _give(ALLOW)],
    )
    return [*code, *(_creations(column, COUNT) if limits_files else []), _give(ALLOW)]


def build_filter(machine: str, pid: int, counts: bool, limits_files: bool) -> Code:
    """Build the filter of denied calls for process `pid`. With `limits_files` and without `counts`, calls that can
    create a file fail."""
    audit, column = ARCHITECTURES[machine]
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), _give(KILL), (_LOAD, 0, 0, 0)]
    code += [(_AT_LEAST, 0, 1, NEWEST + 1), _give(fail(ENOSYS))]  # also every call of the x32 ABI
    for numbers in DENIED.values():
        code += _call(numbers[column], [_give(fail(EPERM))])
    code += _call(CLONE3[column], [_give(fail(ENOSYS))])  # its flags lie in memory: the C library falls back to clone
    code += _call(CLONE[column], [_argument(0), *_all_bits(CLONE_THREAD | CLONE_FILES, ALLOW), _give(fail(EPERM))])
    code += _call(CLOSE_RANGE[column], [_argument(2), *_all_bits(CLOSE_RANGE_UNSHARE, fail(EPERM)), _give(ALLOW)])
    code += _call(MMAP[column], [_argument(3), *_all_bits(MAP_SHARED | MAP_ANONYMOUS, fail(EPERM)), _give(ALLOW)])
    code += _call(MADVISE[column], _only(2, (MADV_DONTNEED, MADV_FREE), 0))
    code += _call(TGKILL[column], _only(0, (pid,), EPERM))
    code += _call(PRLIMIT[column], _only(0, (0,), EPERM))
    code += _call(PRCTL[column], _only(0, PRCTLS, EINVAL))  # the signal at the parent's death stays set
    code += _call(
        FCNTL[column], _all_but(1, (*SENDS_SIGNALS, F_SETLEASE, F_SETPIPE_SZ, *(() if counts else LOCKS)), EPERM)
    )
    code += _call(IOCTL[column], _only(1, IOCTLS, ENOTTY))
    # A datagram socket can send to any address, so only pairs of streams.
    stream = [_argument(1), (_AND, 0, 0, SOCK_TYPES), (_EQUAL, 1, 0, SOCK_STREAM), _give(fail(EPERM)), _give(ALLOW)]
    code += _call(SOCKETPAIR[column], [_argument(0), (_EQUAL, 1, 0, AF_UNIX), _give(fail(EPERM)), *stream])
    code += _call(
        RENAMEAT2[column], [_argument(4), (_ANY_BIT, 0, 1, RENAME_WHITEOUT), _give(fail(EPERM)), _give(ALLOW)]
    )
    # Before Landlock's ABI 3 a file that may be read could be truncated by opening it.
    truncates = [(_AND, 0, 0, O_TRUNC | O_ACCMODE), (_EQUAL, 0, 1, O_TRUNC), _give(fail(EPERM))]
    if limits_files:
        code += _call(OPENAT2[column], [_give(fail(ENOSYS))])  # its flags lie in memory
        code += _call(FALLOCATE[column], [_give(fail(EOPNOTSUPP))])  # it can take space beyond a file's length
    if limits_files and not counts:
        return [*code, *_creations(column, fail(EDQUOT), truncates), _give(ALLOW)]
    return [*code, *_opens(column, truncates), _give(ALLOW)]


def _creations(column: int, action: int, *checks: Code) -> Code:
    """Apply `action` to calls that can create a file, and run `checks` as `_opens` does."""
    code = [step for numbers in CREATES.values() for step in _call(numbers[column], [_give(action)])]
    return code + _opens(column, [(_ANY_BIT, 0, 1, O_CREAT | O_TMPFILE), _give(action)], *checks)


def _opens(column: int, *checks: Code) -> Code:
    """Run each of `checks` on the flags of `open` and `openat`; allow calls that pass all."""
    code = []
    for numbers, flags in ((OPEN, 1), (OPENAT, 2)):
        code += _call(
            numbers[column], [*(step for check in checks for step in (_argument(flags), *check)), _give(ALLOW)]
        )
    return code


def pack(code: Code) -> bytes:
    """Encode `code` for the kernel: struct sock_filter, 8 bytes each."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _all_bits(bits: int, action: int) -> Code:
    """Give `action` when the loaded value has all of `bits`. Otherwise the value is lost."""
    return [(_AND, 0, 0, bits), (_EQUAL, 0, 1, bits), _give(action)]


def _give(action: int) -> tuple[int, int, int, int]:
    return _RETURN, 0, 0, action


def _argument(index: int) -> tuple[int, int, int, int]:
    return _LOAD, 0, 0, 16 + 8 * index  # its low 32 bits


def _call(number: int | None, body: Code) -> Code:
    """Run `body`, which returns on every path, for the call with this number."""
    return [] if number is None else [(_EQUAL, 0, len(body), number), *body]


def _only(index: int, values: tuple[int, ...], error: int) -> Code:
    """Allow these values of an argument; other values fail with `error`."""
    return [_argument(index), *(step for v in values for step in ((_EQUAL, 0, 1, v), _give(ALLOW))), _give(fail(error))]


def _all_but(index: int, values: tuple[int, ...], error: int) -> Code:
    """Make these values of an argument fail with `error`; other values pass."""
    return [_argument(index), *(step for v in values for step in ((_EQUAL, 0, 1, v), _give(fail(error)))), _give(ALLOW)]
