"""Checks how GPUs and nodes are connected: NVLink and PCIe by `nvidia-smi topo -m`, InfiniBand and RoCE by the kernel's
files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megagrpo.platform.doctor.gpu_checks import TOPOLOGY
from megagrpo.platform.doctor.machine import Finding, Machine
from megagrpo.platform.doctor.needs import Needs

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the header
NEAR = {"PIX", "PXB", "PHB"}  # GPU and network card below one CPU's root complex
GPU, CARD = re.compile(r"GPU\d+"), re.compile(r"NIC\d+|mlx\d+_\d+")


@dataclass(frozen=True)
class Topology:
    """The table of `nvidia-smi topo -m`: for each GPU, its link to each other GPU and to each network card."""

    between: dict[str, dict[str, str]]
    cards: dict[str, dict[str, str]]


def parse_topology(text: str) -> Topology:
    """Return the table in the output of `nvidia-smi topo -m`; a table without rows for any other text."""
    rows = [[cell.strip() for cell in ESCAPE.sub("", line).split("\t")] for line in text.splitlines()]
    header = next((row for row in rows if any(GPU.fullmatch(cell) for cell in row[1:])), [])
    between: dict[str, dict[str, str]] = {}
    cards: dict[str, dict[str, str]] = {}
    for row in rows:
        if row is header or not GPU.fullmatch(row[0]):
            continue
        links = dict(zip(header[1:], row[1:], strict=False))
        between[row[0]] = {name: link for name, link in links.items() if GPU.fullmatch(name) and name != row[0]}
        cards[row[0]] = {name: link for name, link in links.items() if CARD.fullmatch(name)}
    return Topology(between, cards)


def topology_checks(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Check the links between GPUs, and from each GPU to its nearest network card."""
    text = machine.run(*TOPOLOGY)
    if text is None:
        yield Finding("NVLink", machine.errors[" ".join(TOPOLOGY)], "skipped", "run nvidia-smi topo -m by hand")
        return
    table = parse_topology(text)
    if len(table.between) < 2:
        yield Finding("NVLink", "one GPU, so there is no link to check", "skipped", "none needed")
    else:
        yield _nvlink(table)
    if any(table.cards.values()):
        yield _nearest_cards(table, needs)


def _nvlink(table: Topology) -> Finding:
    links = {link for row in table.between.values() for link in row.values()}
    found = f"{len(table.between)} GPUs, links {', '.join(sorted(links))}"
    if all(link.startswith("NV") for link in links):
        return Finding("NVLink", found)
    fix = (
        "keep parallel.tp, ep and cp within GPUs that NVLink joins; if the machine has NVLink, see nvidia-smi "
        "nvlink --status"
    )
    return Finding("NVLink", f"{found}: some pairs send over PCIe", "warn", fix)


def _nearest_cards(table: Topology, needs: Needs) -> Finding:
    far = [gpu for gpu, row in table.cards.items() if not NEAR & set(row.values())]
    count = len({card for row in table.cards.values() for card in row})
    if far and needs.nodes > 1:
        fix = "choose GPUs beside a network card, or see in the BIOS which slots share a root complex"
        return Finding("network cards", f"{count}; none is near {', '.join(far)}", "warn", fix)
    return Finding(
        "network cards", f"{count}; " + ("each GPU has one nearby" if not far else f"none is near {', '.join(far)}")
    )


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device: `state` such as ACTIVE, `rate` in Gb/s, `layer` InfiniBand or Ethernet (RoCE)."""

    name: str
    state: str
    rate: float
    layer: str


def ports(machine: Machine) -> list[Port]:
    """Return the ports of RDMA devices, from the files that ibstat reads too."""
    found = []
    for path in machine.folders("sys/class/infiniband/*/ports/*"):
        folder = path.relative_to(machine.root)
        state = (machine.read(f"{folder}/state") or "").partition(":")[2].strip()
        rate = re.match(r"[\d.]+", machine.read(f"{folder}/rate") or "")
        layer = machine.read(f"{folder}/link_layer") or "unknown"
        found.append(Port(f"{path.parent.parent.name}/{path.name}", state, float(rate[0]) if rate else 0.0, layer))
    return found


def parse_ibstat(text: str) -> list[Port]:
    """Return the ports in the output of `ibstat`."""
    found, device, number, values = [], "", "", {"State": "", "Rate": "", "Link layer": ""}
    for line in text.splitlines():
        if match := re.match(r"\s*CA '([^']+)'", line):
            device = match[1]
        elif match := re.match(r"\s*Port (\d+):", line):
            number, values = match[1], {}
        else:
            key, _, value = line.strip().partition(": ")
            values[key] = value
            if key == "Link layer":
                rate = re.match(r"[\d.]+", values.get("Rate", ""))
                found.append(
                    Port(f"{device}/{number}", values.get("State", "").upper(), float(rate[0]) if rate else 0.0, value)
                )
    return found


def rdma_checks(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Check InfiniBand and RoCE. One node needs none."""
    known = ports(machine)
    if not known and (text := machine.run("ibstat")) is not None:
        known = parse_ibstat(text)
    if not known:
        several = needs.nodes > 1
        fix = (
            "load the driver of the network cards; without RDMA, NCCL uses TCP and a step takes much longer"
            if several
            else "none needed"
        )
        yield Finding("RDMA", "no InfiniBand or RoCE device", "warn" if several else "skipped", fix)
        return
    active = [port for port in known if port.state == "ACTIVE"]
    said = ", ".join(f"{port.name} {port.layer} {port.state} {port.rate:g} Gb/s" for port in known)
    if not active:
        yield Finding("RDMA", said, "warn", "check cables and the subnet manager (ibstat); NCCL will use TCP")
    elif len({port.rate for port in active}) > 1 or len(active) < len(known):
        fix = "name the fast ones: NCCL_IB_HCA=mlx5_0,mlx5_1; check the cables of the ports that are down"
        yield Finding(
            "RDMA", f"{said}: not all alike", "warn" if needs.nodes > 1 else "ok", fix if needs.nodes > 1 else ""
        )
    else:
        yield Finding("RDMA", said)
    if active and not machine.folders("dev/infiniband/uverbs*"):
        fix = "start the container with --device /dev/infiniband (Kubernetes: the RDMA device plug-in)"
        yield Finding(
            "RDMA devices", "/dev/infiniband has no uverbs device", "fail" if needs.nodes > 1 else "warn", fix
        )
    elif active:
        yield _gpu_direct(machine)


def _gpu_direct(machine: Machine) -> Finding:
    modules = machine.read("proc/modules") or ""
    if re.search(r"^(nvidia_peermem|nv_peer_mem) ", modules, re.MULTILINE):
        return Finding("GPUDirect RDMA", "nvidia_peermem is loaded")
    fix = (
        "as root on the host: modprobe nvidia-peermem; not needed where NCCL_DEBUG=INFO prints 'GPU Direct RDMA "
        "Enabled' by DMA-BUF"
    )
    return Finding("GPUDirect RDMA", "nvidia_peermem is not loaded", "warn", fix)
