"""A real Slurm on this machine with simulated nodes: several slurmd, each with its own node name. With `networks`,
hosts share neither loopback nor interfaces. Needs root and Debian's packages slurm-wlm and munge; networks also
iproute2.

It changes nothing outside one folder: it has its own munge key, socket and ports.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

CONFIG = """\
ClusterName=pretend
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=3,sched_interval=3,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=20
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=64 CoresPerSocket=64 RealMemory=20000 "
    "State=UNKNOWN\n"
)


def missing(*commands: str) -> str:
    """The reason why Slurm, or one of these commands, is missing here; "" if nothing is missing."""
    needed = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", *commands) if shutil.which(name) is None]
    if needed:
        return f"{', '.join(needed)} not found: apt-get install --no-install-recommends slurm-wlm munge iproute2"
    return "" if os.geteuid() == 0 else "needs root"


class Networks:
    """Hosts with separate networks: each is a namespace with a loopback and an `eth0`, 10.213.77.1 and following, on
    one bridge. This machine is on the bridge as 10.213.77.254. Names and addresses are fixed, so a lock makes a second
    user wait for the first."""

    BRIDGE, SUBNET, CONTROLLER = "grpo0", "10.213.77", "10.213.77.254"
    LOCK = "/run/lock/megagrpo_networks"

    def __init__(self, names: Sequence[str]):
        self.names = list(names)

    def __enter__(self) -> Networks:
        self._lock = open(self.LOCK, "w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._remove()  # of killed tests
        _ip(
            f"link add {self.BRIDGE} type bridge",
            f"addr add {self.CONTROLLER}/24 dev {self.BRIDGE}",
            f"link set {self.BRIDGE} up",
        )
        for name in self.names:
            _ip(f"netns add grpo-{name}", f"link add grpo-{name} type veth peer name eth0 netns grpo-{name}")
            _ip(
                f"link set grpo-{name} master {self.BRIDGE} up",
                f"-n grpo-{name} addr add {self.address(name)}/24 dev eth0",
            )
            _ip(f"-n grpo-{name} link set eth0 up", f"-n grpo-{name} link set lo up")
        return self

    def __exit__(self, *raised: object) -> None:
        self._remove()
        self._lock.close()

    def _remove(self) -> None:
        for what in [*(f"netns del grpo-{name}" for name in self.names), f"link del {self.BRIDGE}"]:
            subprocess.run(["ip", *what.split()], capture_output=True)

    def address(self, name: str) -> str:
        return f"{self.SUBNET}.{self.names.index(name) + 1}"

    def inside(self, name: str) -> list[str]:
        """The command prefix that runs a command on that host."""
        return ["nsenter", f"--net=/var/run/netns/grpo-{name}"]

    def cut(self, name: str, off: bool = True) -> None:
        """Unplug the host's cable, or plug it in again."""
        _ip(f"link set grpo-{name} {'down' if off else 'up'}")


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


@contextlib.contextmanager
def slurm(folder: Path, nodes: int = 2, networks: bool = False) -> Iterator[Networks | None]:
    """Slurm's commands work inside, through SLURM_CONF. All daemons end afterwards. With `networks` each node is a
    separate host."""
    names = [f"n{number + 1}" for number in range(nodes)]
    with Networks(names) if networks else contextlib.nullcontext() as wired:
        with _slurm(folder, names, wired):
            yield wired


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A fixture for the tests of a file: its own Slurm, where Slurm is installed."""
    if reason := missing():
        pytest.skip(reason)
    with slurm(tmp_path_factory.mktemp("slurm")):
        yield


@contextlib.contextmanager
def _slurm(folder: Path, names: list[str], wired: Networks | None) -> Iterator[None]:
    nodes = len(names)
    for path in [folder / "state", *(folder / f"spool.{name}" for name in names)]:
        path.mkdir(parents=True)
    folder.chmod(0o711)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    ports = free_ports(nodes + 1)
    host = socket.gethostname().partition(".")[0]
    addresses = [wired.address(name) if wired else "127.0.0.1" for name in names]
    described = [
        NODE.format(name=name, host=host, address=address, port=port)
        for name, address, port in zip(names, addresses, ports[1:], strict=True)
    ]
    controller = wired.CONTROLLER if wired else "127.0.0.1"
    (folder / "slurm.conf").write_text(
        CONFIG.format(host=host, address=controller, port=ports[0], folder=folder) + "".join(described)
    )
    (folder / "cgroup.conf").touch()  # empty: slurmd requires the file
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    files = {name: folder / f"munge.{name}" for name in ("pid", "log", "seed")}
    try:
        munge = [
            f"--socket={folder}/munge.sock",
            f"--key-file={key}",
            *(f"--{name}-file={path}" for name, path in files.items()),
        ]
        daemons = [[*(wired.inside(name) if wired else []), "slurmd", "-N", name] for name in names]
        for command in (["munged", "--force", *munge], ["slurmctld"], *daemons):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while command_output("sinfo", "--noheader", "--Node", "--states=idle").count("\n") < nodes:
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.2)
        yield
    finally:
        command_output("scancel", "--user=root")
        _wait(lambda: not command_output("squeue", "--noheader"), 30)  # KillWait and a little more
        running = []
        for file in [*(folder / f"slurmd.{name}.pid" for name in names), folder / "slurmctld.pid", files["pid"]]:
            with contextlib.suppress(OSError, ValueError):
                running.append(int(file.read_text()))
                os.kill(running[-1], signal.SIGTERM)
        _wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in running), 10)
        for pid in {*running, *_processes_with(f"SLURM_CONF={folder}/slurm.conf")} - {os.getpid()}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        del os.environ["SLURM_CONF"]
        if before is not None:
            os.environ["SLURM_CONF"] = before


def command_output(*command: str) -> str:
    """The output of one of Slurm's commands; "" when it fails."""
    return subprocess.run(command, capture_output=True, text=True).stdout


def told(job: str, key: str) -> str:
    """A field of a job in Slurm, such as JobState or Restarts."""
    words = command_output("scontrol", "show", "job", "--oneliner", job).split()
    return next((word.partition("=")[2] for word in words if word.startswith(f"{key}=")), "")


def start_now(job: str) -> None:
    """Skip the two minutes for which Slurm delays a requeued job."""
    command_output("scontrol", "update", f"JobId={job}", "StartTime=now")


def processes_of(job: str) -> list[int]:
    """Living processes that Slurm has started for a job, and their children. Servers do not inherit Slurm's
    variables."""
    slurm = _processes_with(f"SLURM_JOB_ID={job}", f"SLURM_CONF={os.environ['SLURM_CONF']}")
    return sorted({*slurm, *_processes_with(f"MEGAGRPO_JOB=slurm-{job}")})


def _processes_with(*variables: str) -> list[int]:
    """Living processes whose environment contains all of these words."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            if all(variable.encode() in words for variable in variables):
                found.append(int(entry))
    return found


def _wait(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Choose `count` ports without a listener."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
