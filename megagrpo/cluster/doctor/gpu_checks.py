"""Checks the GPUs by `nvidia-smi -q -x`: driver, modes, memory in use. Reads only and changes no setting."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from megagrpo.cluster.doctor.machine import Finding, Machine, judged
from megagrpo.cluster.doctor.needs import Needs

NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI vendor, and the first byte of the class of display controllers
# CUDA major version -> its oldest driver, by NVIDIA's CUDA compatibility guide
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
IN_USE_MIB = 1024  # memory of other processes that a run can spare
XML = ("nvidia-smi", "-q", "-x")


@dataclass(frozen=True)
class Gpu:
    """One GPU in the output of `nvidia-smi -q -x`."""

    node: ET.Element

    def text(self, path: str) -> str:
        """Return the text at a path of the XML; N/A without it."""
        return self.node.findtext(path, "N/A").strip()

    def number(self, path: str) -> float:
        """Return the number at a path, in nvidia-smi's unit; 0 without one."""
        match = re.match(r"[\d.]+", self.text(path))
        return float(match[0]) if match else 0.0


@dataclass(frozen=True)
class NvidiaState:
    """Driver and GPUs, as `nvidia-smi -q -x` reports them."""

    driver: str
    cuda: str  # newest CUDA version of the driver
    gpus: tuple[Gpu, ...]


def parse_state(text: str) -> NvidiaState | None:
    """Return the state in the output of `nvidia-smi -q -x`; None if it is not such an output."""
    try:
        log = ET.fromstring(text)
    except ET.ParseError:
        return None
    gpus = tuple(map(Gpu, log.findall("gpu")))
    return NvidiaState(log.findtext("driver_version", "").strip(), log.findtext("cuda_version", "").strip(), gpus)


def has_nvidia_card(machine: Machine) -> bool:
    """Whether the PCI bus holds an NVIDIA GPU, with or without a driver."""
    devices = (str(path.relative_to(machine.root)) for path in machine.folders("sys/bus/pci/devices/*"))
    return any(
        machine.read(f"{one}/vendor") == NVIDIA and (machine.read(f"{one}/class") or "").startswith(DISPLAY)
        for one in devices
    )


def nvidia_state(machine: Machine) -> NvidiaState | None:
    """Return the state of the GPUs; None without a working driver."""
    text = machine.run(*XML)
    return None if text is None else parse_state(text)


def gpu_checks(machine: Machine, needs: Needs, torch_cuda: str) -> Iterator[Finding]:
    """Check driver and GPUs. `torch_cuda` is the installed torch's CUDA version, such as 13.0; empty without CUDA."""
    state = nvidia_state(machine)
    if state is None or not state.gpus:
        yield _no_driver(machine)
        return
    yield driver_check(state, torch_cuda)
    visible = visible_gpus(state.gpus, machine.environment)
    yield from (finding for check in GPU_CHECKS if (finding := check(visible, needs)) is not None)


def _no_driver(machine: Machine) -> Finding:
    if has_nvidia_card(machine):
        reason = machine.errors.get(" ".join(XML), "nvidia-smi lists no GPU")
        fix = "install NVIDIA's driver, or start the container with --gpus all"
        return Finding("driver", f"the PCI bus has an NVIDIA GPU, but {reason}", "fail", fix)
    text = "no NVIDIA GPU: only what a CPU machine needs is checked"
    return Finding("GPU", text, "skipped", "none needed to train on a CPU")


def driver_check(state: NvidiaState, torch_cuda: str) -> Finding:
    """Compare the driver's CUDA version with torch's. A driver runs builds of its major version and of older ones."""
    result = f"driver {state.driver}, CUDA {state.cuda} at most; torch is built for CUDA {torch_cuda or 'none'}"
    if not torch_cuda:
        return Finding("driver", result, "fail", "install a torch for CUDA: megagrpo install gpu, in a new environment")
    theirs, ours = (int(text.partition(".")[0] or 0) if text[:1].isdigit() else 0 for text in (state.cuda, torch_cuda))
    oldest = f" to {OLDEST_DRIVER[ours]} or later" if ours in OLDEST_DRIVER else ""
    return judged("driver", result, theirs >= ours, f"update the driver{oldest}", "fail")


def visible_gpus(gpus: Sequence[Gpu], environment: dict[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves visible. Only counts UUIDs. An invalid entry ends the list."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(gpus)
    ids = list(takewhile(lambda name: _names_a_gpu(name, len(gpus)), map(str.strip, named.split(","))))
    if all(name.isdigit() for name in ids):
        return [gpus[int(name)] for name in ids]
    return list(gpus[: len(ids)])


def _names_a_gpu(name: str, count: int) -> bool:
    return int(name) < count if name.isdigit() else name.startswith(("GPU-", "MIG-"))


def _count(gpus: Sequence[Gpu], needs: Needs) -> Finding:
    kinds = sorted({gpu.text("product_name") for gpu in gpus})
    result, least = f"{len(gpus)} visible: {', '.join(kinds) or 'none'}", max(1, needs.gpus)
    if len(gpus) < least:
        fix = "check CUDA_VISIBLE_DEVICES, the container's --gpus and nvidia-smi -L"
        return Finding("GPU count", f"{result}; {needs.source} uses {least}", "fail", fix)
    fix = "use GPUs of one kind, because all wait for the slowest; choose by CUDA_VISIBLE_DEVICES"
    return judged("GPU count", result, len(kinds) == 1, fix)


def _mig(gpus: Sequence[Gpu], needs: Needs) -> Finding:
    cut = _number_with(gpus, "mig_mode/current_mig", "Enabled")
    fix = "ask the administrator to turn MIG off; NCCL and CUDA IPC do not connect MIG instances"
    result = f"enabled on {cut} GPU(s)" if cut else "disabled"
    return judged("MIG", result, not cut, fix, "fail" if len(gpus) > 1 else "warn")


def _compute_mode(gpus: Sequence[Gpu], needs: Needs) -> Finding:
    modes = sorted({gpu.text("compute_mode") for gpu in gpus} - {"Default", "N/A"})
    prohibited = "Prohibited" in modes
    shared = "; trainer and vLLM are two processes on each GPU" if modes and needs.shares_gpu else ""
    fix = "as root: nvidia-smi -c 0" + ("" if prohibited else "; or set rollout.placement: dedicated")
    return judged("compute mode", (", ".join(modes) or "Default") + shared, not (prohibited or shared), fix, "fail")


def _memory_in_use(gpus: Sequence[Gpu], needs: Needs) -> Finding:
    used = [gpu.number("fb_memory_usage/used") for gpu in gpus]
    taken = [f"{mib / 1024:.1f} GiB on GPU {index}" for index, mib in enumerate(used) if mib > IN_USE_MIB]
    result = f"in use: {', '.join(taken)}" if taken else f"at most {max(used, default=0):.0f} MiB in use"
    return judged("GPU memory", result, not taken, "end other processes (nvidia-smi lists them), or choose other GPUs")


def _fabric(gpus: Sequence[Gpu], needs: Needs) -> Finding | None:
    states = {gpu.text("fabric/state") for gpu in gpus} - {"N/A"}
    if not states:
        return None
    ready, fix = states == {"Completed"}, "start nvidia-fabricmanager on the host, in the driver's version"
    return judged("NVSwitch fabric", "ready" if ready else ", ".join(sorted(states)), ready, fix, "fail")


def _number_with(gpus: Sequence[Gpu], path: str, text: str) -> int:
    """Return on how many GPUs nvidia-smi shows this text."""
    return sum(gpu.text(path) == text for gpu in gpus)


GPU_CHECKS: tuple[Callable[[Sequence[Gpu], Needs], Finding | None], ...] = (
    _count,
    _mig,
    _compute_mode,
    _memory_in_use,
    _fabric,
)
