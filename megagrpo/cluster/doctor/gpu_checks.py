"""Checks the GPUs by `nvidia-smi -q -x`: driver, modes, clocks, ECC, health, memory in use. Reads only and changes no
setting."""

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
SLOWED = {  # reasons in nvidia-smi -> what it means
    "hw_thermal_slowdown": "thermal slowdown (hardware)",
    "sw_thermal_slowdown": "thermal slowdown (driver)",
    "hw_power_brake_slowdown": "power brake (power supply)",
    "hw_slowdown": "hardware slowdown",
}
XML = ("nvidia-smi", "-q", "-x")
TOPOLOGY = ("nvidia-smi", "topo", "-m")


@dataclass(frozen=True)
class Gpu:
    """One GPU in the output of `nvidia-smi -q -x`."""

    node: ET.Element

    def text(self, path: str) -> str:
        """Return the text at a path of the XML; N/A without it."""
        return self.node.findtext(path, "N/A").strip()

    def number(self, *paths: str) -> float:
        """Return the first number at one of the paths, in nvidia-smi's unit; 0 without one."""
        matches = (re.match(r"[\d.]+", self.text(path)) for path in paths)
        return next((float(match[0]) for match in matches if match), 0.0)

    def slowdowns(self) -> list[str]:
        """Return why the clocks are low now, by `SLOWED`. Older drivers name the reasons `throttle`."""
        reasons = [*self.node.iterfind("clocks_event_reasons/*"), *self.node.iterfind("clocks_throttle_reasons/*")]
        active = [reason.tag for reason in reasons if (reason.text or "").strip() == "Active"]
        return [SLOWED[name] for tag in active if (name := re.sub(r"clocks_\w+_reason_", "", tag)) in SLOWED]

    def is_broken(self) -> bool:
        """Whether uncorrectable ECC errors occurred since the driver was loaded, or memory rows wait for a remap."""
        errors = [error for error in self.node.iterfind("ecc_errors/volatile/*") if "uncorrectable" in error.tag]
        counts = [int(text) for error in errors if (text := (error.text or "").strip()).isdigit()]
        return any(counts) or "Yes" in [
            self.text(f"remapped_rows/remapped_row_{name}") for name in ("pending", "failure")
        ]


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


def _persistence(gpus: Sequence[Gpu], needs: Needs) -> Finding:
    off = _number_with(gpus, "persistence_mode", "Disabled")
    result = f"off on {off} GPU(s): each start waits for the driver" if off else "on"
    return judged("persistence", result, not off, "as root: nvidia-smi -pm 1")


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


def _ecc(gpus: Sequence[Gpu], needs: Needs) -> Finding:
    if broken := [str(index) for index, gpu in enumerate(gpus) if gpu.is_broken()]:
        result = f"uncorrectable errors or rows to remap on GPU {', '.join(broken)}"
        return Finding("ECC", result, "fail", "reset the GPU or restart the machine; replace the GPU if errors return")
    if off := _number_with(gpus, "ecc_mode/current_ecc", "Disabled"):
        fix = "turn ECC on for long runs: as root nvidia-smi -e 1, then restart"
        return Finding("ECC", f"off on {off} GPU(s): bit flips are not detected", "warn", fix)
    on = _number_with(gpus, "ecc_mode/current_ecc", "Enabled")
    return Finding("ECC", "on, no uncorrectable error" if on else "not supported by the GPU")


def _clocks(gpus: Sequence[Gpu], needs: Needs) -> Finding:
    clocks = sorted({f"{gpu.text('clocks/sm_clock')} of {gpu.text('max_clocks/sm_clock')}" for gpu in gpus})
    slowed = sorted({reason for gpu in gpus for reason in gpu.slowdowns()})
    result = "; ".join([f"SM clock {', '.join(clocks)}", *([", ".join(slowed)] if slowed else [])])
    return judged("clocks", result, not slowed, "check cooling and power supply: nvidia-smi -q -d PERFORMANCE")


def _power(gpus: Sequence[Gpu], needs: Needs) -> Finding | None:
    now = ("gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit")
    default = ("gpu_power_readings/default_power_limit", "power_readings/default_power_limit")
    limits = sorted({(gpu.number(*now), gpu.number(*default)) for gpu in gpus})
    if not all(map(all, limits)):
        return None
    result = ", ".join(f"{limit:g} W of {most:g} W" for limit, most in limits)
    fix = "as root: nvidia-smi -pl DEFAULT; a lower limit lowers the clocks under load"
    return judged("power limit", result, all(limit >= 0.99 * most for limit, most in limits), fix)


def _memory_in_use(gpus: Sequence[Gpu], needs: Needs) -> Finding:
    used = [gpu.number("fb_memory_usage/used") for gpu in gpus]
    taken = [f"{mib / 1024:.1f} GiB on GPU {index}" for index, mib in enumerate(used) if mib > IN_USE_MIB]
    result = f"in use: {', '.join(taken)}" if taken else f"at most {max(used, default=0):.0f} MiB in use"
    return judged("GPU memory", result, not taken, "end other processes (nvidia-smi lists them), or choose other GPUs")


def _pcie(gpus: Sequence[Gpu], needs: Needs) -> Finding | None:
    folder = "pci/pci_gpu_link_info/link_widths"
    links = [(gpu.text(f"{folder}/current_link_width"), gpu.text(f"{folder}/max_link_width")) for gpu in gpus]
    narrow = [str(index) for index, (now, most) in enumerate(links) if now != most and "N/A" not in (now, most)]
    widths = sorted({now for now, _ in links})
    if widths in ([], ["N/A"]):
        return None
    result = f"link {', '.join(widths)}" + (f", below the maximum on GPU {', '.join(narrow)}" if narrow else "")
    fix = "seat the card or its riser again; copies to the host (train.offload) take longer"
    return judged("PCIe", result, not narrow, fix)


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
    _persistence,
    _mig,
    _compute_mode,
    _ecc,
    _clocks,
    _power,
    _memory_in_use,
    _pcie,
    _fabric,
)
