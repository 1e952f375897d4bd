"""Checks the GPUs by `nvidia-smi -q -x`: driver, modes, clocks, ECC, health, memory in use. Reads only and changes no
setting."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from megagrpo.platform.doctor.machine import Finding, Machine
from megagrpo.platform.doctor.needs import Needs

NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI vendor, and the first byte of the class of display controllers
# CUDA major version -> its oldest driver, by NVIDIA's CUDA compatibility guide
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
IN_USE_MIB = 1024  # memory of other processes that a run can spare
FLAT_LINKS = re.compile(r"NV\d+")
SLOWED = {  # reasons in nvidia-smi -> what it means
    "hw_thermal_slowdown": "thermal slowdown (hardware)",
    "sw_thermal_slowdown": "thermal slowdown (driver)",
    "hw_power_brake_slowdown": "power brake (power supply)",
    "hw_slowdown": "hardware slowdown",
}
XML = ("nvidia-smi", "-q", "-x")
TOPOLOGY = ("nvidia-smi", "topo", "-m")


@dataclass(frozen=True)
class GpuState:
    """The fields of one GPU that checks read; texts are nvidia-smi's."""

    name: str
    persistence: str
    mig: str
    compute_mode: str
    ecc: str
    uncorrectable: int  # ECC errors since the driver was loaded
    remap_pending: bool
    fabric: str  # state of the NVSwitch fabric
    used_mib: float
    clock: str  # SM clock now / at most
    slowed: tuple[str, ...]
    power_limit: float  # watts
    default_power_limit: float
    link_width: str  # PCIe, now
    max_link_width: str


@dataclass(frozen=True)
class NvidiaState:
    """Driver and GPUs, as `nvidia-smi -q -x` reports them."""

    driver: str
    cuda: str  # newest CUDA version of the driver
    gpus: tuple[GpuState, ...]


def parse_state(text: str) -> NvidiaState | None:
    """Return the state in the output of `nvidia-smi -q -x`; None if it is not such an output."""
    try:
        log = ET.fromstring(text)
    except ET.ParseError:
        return None
    gpus = tuple(_gpu(node) for node in log.findall("gpu"))
    return NvidiaState(log.findtext("driver_version", "").strip(), log.findtext("cuda_version", "").strip(), gpus)


def _gpu(node: ET.Element) -> GpuState:
    def text(path: str, default: str = "N/A") -> str:
        return node.findtext(path, default).strip()

    def number(*paths: str) -> float:
        """Return the first number at one of the paths; 0 without one."""
        found = (re.match(r"[\d.]+", text(path)) for path in paths)
        return next((float(match[0]) for match in found if match), 0.0)

    volatile = node.find("ecc_errors/volatile")
    errors = [] if volatile is None else [one.text or "" for one in volatile if "uncorrectable" in one.tag]
    reasons = [one for name in ("clocks_event_reasons", "clocks_throttle_reasons") for one in node.findall(f"{name}/*")]
    active = {
        re.sub(r"clocks_(event|throttle)_reason_", "", one.tag)
        for one in reasons
        if (one.text or "").strip() == "Active"
    }
    return GpuState(
        name=text("product_name"),
        persistence=text("persistence_mode"),
        mig=text("mig_mode/current_mig"),
        compute_mode=text("compute_mode"),
        ecc=text("ecc_mode/current_ecc"),
        uncorrectable=sum(int(count) for count in errors if count.strip().isdigit()),
        remap_pending="Yes" in (text("remapped_rows/remapped_row_pending"), text("remapped_rows/remapped_row_failure")),
        fabric=text("fabric/state"),
        used_mib=number("fb_memory_usage/used"),
        clock=f"{text('clocks/sm_clock')} of {text('max_clocks/sm_clock')}",
        slowed=tuple(what for name, what in SLOWED.items() if name in active),
        power_limit=number("gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit"),
        default_power_limit=number("gpu_power_readings/default_power_limit", "power_readings/default_power_limit"),
        link_width=text("pci/pci_gpu_link_info/link_widths/current_link_width"),
        max_link_width=text("pci/pci_gpu_link_info/link_widths/max_link_width"),
    )


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
    """Check driver and GPUs. `torch_cuda` is the CUDA version of the installed torch, such as 13.0; empty without
    CUDA."""
    state = nvidia_state(machine)
    if state is None or not state.gpus:
        yield _no_driver(machine)
        return
    yield driver_check(state, torch_cuda)
    visible = visible_gpus(state.gpus, machine.environment)
    yield _count(visible, needs)
    yield from (mode for check in GPU_CHECKS if (mode := check(visible, needs)) is not None)


def _no_driver(machine: Machine) -> Finding:
    reason = machine.errors.get(" ".join(XML), "nvidia-smi lists no GPU")
    if has_nvidia_card(machine):
        return Finding("driver", f"the PCI bus has an NVIDIA GPU, but {reason}", "fail", "install NVIDIA's driver, or "
            "start the "
                       "container with --gpus all")  # fmt: skip
    return Finding(
        "GPU", "no NVIDIA GPU: only what a CPU machine needs is checked", "skipped", "none needed to train on a CPU"
    )


def driver_check(state: NvidiaState, torch_cuda: str) -> Finding:
    """Compare the driver's CUDA version with torch's. A driver runs each CUDA build of its major version and of older
    ones."""
    found = f"driver {state.driver}, CUDA {state.cuda} at most; torch is built for CUDA {torch_cuda or 'none'}"
    if not torch_cuda:
        return Finding("driver", found, "fail", "install a torch for CUDA: megagrpo install gpu, in a new environment")
    theirs, ours = (int(text.partition(".")[0] or 0) if text[:1].isdigit() else 0 for text in (state.cuda, torch_cuda))
    if theirs < ours:
        oldest = OLDEST_DRIVER.get(ours)
        return Finding("driver", found, "fail", f"update the driver{f' to {oldest} or later' if oldest else ''}")
    return Finding("driver", found)


def visible_gpus(gpus: Sequence[GpuState], environment: dict[str, str]) -> list[GpuState]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves visible. UUIDs are only counted. CUDA ignores what follows an
    invalid entry."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(gpus)
    ids = list(takewhile(lambda name: _names_a_gpu(name, len(gpus)), map(str.strip, named.split(","))))
    if all(name.isdigit() for name in ids):
        return [gpus[int(name)] for name in ids]
    return list(gpus[: len(ids)])


def _names_a_gpu(name: str, count: int) -> bool:
    return int(name) < count if name.isdigit() else name.startswith(("GPU-", "MIG-"))


def _count(visible: Sequence[GpuState], needs: Needs) -> Finding:
    kinds = sorted({gpu.name for gpu in visible})
    found = f"{len(visible)} visible: {', '.join(kinds) or 'none'}"
    if len(visible) < max(1, needs.gpus):
        fix = "check CUDA_VISIBLE_DEVICES, the container's --gpus and nvidia-smi -L"
        return Finding("GPU count", f"{found}; {needs.source} uses {max(1, needs.gpus)}", "fail", fix)
    if len(kinds) > 1:
        return Finding(
            "GPU count",
            found,
            "warn",
            "use GPUs of one kind, because all wait for the slowest; choose by CUDA_VISIBLE_DEVICES",
        )
    return Finding("GPU count", found)


def _persistence(gpus: Sequence[GpuState], needs: Needs) -> Finding:
    off = sum(gpu.persistence == "Disabled" for gpu in gpus)
    if off:
        return Finding(
            "persistence", f"off on {off} GPU(s): each start waits for the driver", "warn", "as root: nvidia-smi -pm 1"
        )
    return Finding("persistence", "on")


def _mig(gpus: Sequence[GpuState], needs: Needs) -> Finding:
    if cut := sum(gpu.mig == "Enabled" for gpu in gpus):
        fix = "ask the administrator to turn MIG off; NCCL and CUDA IPC do not connect MIG instances"
        return Finding("MIG", f"enabled on {cut} GPU(s)", "fail" if len(gpus) > 1 else "warn", fix)
    return Finding("MIG", "disabled")


def _compute_mode(gpus: Sequence[GpuState], needs: Needs) -> Finding:
    modes = sorted({gpu.compute_mode for gpu in gpus} - {"Default", "N/A"})
    if not modes:
        return Finding("compute mode", "Default")
    prohibited = "Prohibited" in modes
    bad = prohibited or needs.shares_gpu
    fix = (
        "as root: nvidia-smi -c 0; or set rollout.placement: dedicated"
        if not prohibited
        else "as root: nvidia-smi -c 0"
    )
    found = (
        f"{', '.join(modes)}; trainer and vLLM are two processes on each GPU" if needs.shares_gpu else ", ".join(modes)
    )
    return Finding("compute mode", found, "fail" if bad else "ok", fix if bad else "")


def _ecc(gpus: Sequence[GpuState], needs: Needs) -> Finding:
    broken = [index for index, gpu in enumerate(gpus) if gpu.uncorrectable or gpu.remap_pending]
    if broken:
        said = f"uncorrectable errors or rows to remap on GPU {', '.join(map(str, broken))}"
        return Finding("ECC", said, "fail", "reset the GPU or restart the machine; replace the GPU if errors return")
    off = sum(gpu.ecc == "Disabled" for gpu in gpus)
    if off:
        fix = "turn ECC on for long runs: as root nvidia-smi -e 1, then restart"
        return Finding("ECC", f"off on {off} GPU(s): bit flips are not detected", "warn", fix)
    return Finding(
        "ECC", "on, no uncorrectable error" if any(gpu.ecc == "Enabled" for gpu in gpus) else "not supported by the GPU"
    )


def _clocks(gpus: Sequence[GpuState], needs: Needs) -> Finding:
    found = f"SM clock {', '.join(sorted({gpu.clock for gpu in gpus}))}"
    if slowed := sorted({reason for gpu in gpus for reason in gpu.slowed}):
        return Finding(
            "clocks",
            f"{found}; {', '.join(slowed)}",
            "warn",
            "check cooling and power supply: nvidia-smi -q -d PERFORMANCE",
        )
    return Finding("clocks", found)


def _power(gpus: Sequence[GpuState], needs: Needs) -> Finding | None:
    limits = sorted({(gpu.power_limit, gpu.default_power_limit) for gpu in gpus})
    if not all(limit and default for limit, default in limits):
        return None
    found = ", ".join(f"{limit:g} W of {default:g} W" for limit, default in limits)
    if any(limit < 0.99 * default for limit, default in limits):
        return Finding(
            "power limit", found, "warn", "as root: nvidia-smi -pl DEFAULT; a lower limit lowers the clocks under load"
        )
    return Finding("power limit", found)


def _memory_in_use(gpus: Sequence[GpuState], needs: Needs) -> Finding:
    used = {index: gpu.used_mib for index, gpu in enumerate(gpus) if gpu.used_mib > IN_USE_MIB}
    if used:
        said = ", ".join(f"{mib / 1024:.1f} GiB on GPU {index}" for index, mib in used.items())
        return Finding(
            "GPU memory", f"in use: {said}", "warn", "end other processes (nvidia-smi lists them), or choose other GPUs"
        )
    return Finding("GPU memory", f"at most {max((gpu.used_mib for gpu in gpus), default=0):.0f} MiB in use")


def _pcie(gpus: Sequence[GpuState], needs: Needs) -> Finding | None:
    narrow = [
        i
        for i, gpu in enumerate(gpus)
        if gpu.link_width != gpu.max_link_width and "N/A" not in (gpu.link_width, gpu.max_link_width)
    ]
    widths = sorted({gpu.link_width for gpu in gpus})
    if narrow:
        fix = "seat the card or its riser again; copies to the host (train.offload) take longer"
        return Finding(
            "PCIe", f"link {', '.join(widths)}, below the maximum on GPU {', '.join(map(str, narrow))}", "warn", fix
        )
    return None if widths in ([], ["N/A"]) else Finding("PCIe", f"link {', '.join(widths)}")


def _fabric(gpus: Sequence[GpuState], needs: Needs) -> Finding | None:
    states = {gpu.fabric for gpu in gpus} - {"N/A"}
    if not states:
        return None
    if states != {"Completed"}:
        fix = "start nvidia-fabricmanager on the host, in the driver's version"
        return Finding("NVSwitch fabric", ", ".join(sorted(states)), "fail", fix)
    return Finding("NVSwitch fabric", "ready")


GPU_CHECKS: tuple[Callable[[Sequence[GpuState], Needs], Finding | None], ...] = (
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
