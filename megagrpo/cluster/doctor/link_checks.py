"""Checks how GPUs and nodes connect: NVLink and PCIe by `nvidia-smi topo -m`, InfiniBand and RoCE by kernel files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megagrpo.cluster.doctor.gpu_checks import TOPOLOGY
from megagrpo.cluster.doctor.machine import Finding, Machine, judged
from megagrpo.cluster.doctor.needs import Needs

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the header
NEAR = {"PIX", "PXB", "PHB"}  # GPU and network card below one CPU's root complex
GPU_NAME, CARD_NAME = re.compile(r"GPU\d+"), re.compile(r"NIC\d+|mlx\d+_\d+")
type Table = dict[str, dict[str, str]]  # GPU -> name of a GPU or card -> link


def parse_topology(text: str) -> tuple[Table, Table]:
    """Return each GPU's links to GPUs and to network cards from `nvidia-smi topo -m`; no rows for other text."""
    rows = [[cell.strip() for cell in ESCAPE.sub("", line).split("\t")] for line in text.splitlines()]
    header = next((row for row in rows if any(GPU_NAME.fullmatch(cell) for cell in row[1:])), [])
    links = {row[0]: dict(zip(header[1:], row[1:], strict=False)) for row in rows if GPU_NAME.fullmatch(row[0])}

    def links_to(pattern: re.Pattern[str]) -> Table:
        return {
            gpu: {name: link for name, link in row.items() if pattern.fullmatch(name) and name != gpu}
            for gpu, row in links.items()
        }

    return links_to(GPU_NAME), links_to(CARD_NAME)


def topology_checks(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Check the links between GPUs, and from each GPU to its nearest network card."""
    text = machine.run(*TOPOLOGY)
    if text is None:
        yield Finding("NVLink", machine.errors[" ".join(TOPOLOGY)], "skipped", "run nvidia-smi topo -m by hand")
        return
    gpus, cards = parse_topology(text)
    if len(gpus) < 2:
        yield Finding("NVLink", "one GPU, so there is no link to check", "skipped", "none needed")
    else:
        yield _nvlink(gpus)
    if any(cards.values()):
        yield _nearest_cards(cards, needs)


def _nvlink(gpus: Table) -> Finding:
    links = sorted({link for row in gpus.values() for link in row.values()})
    fast = all(link.startswith("NV") for link in links)
    result = f"{len(gpus)} GPUs, links {', '.join(links)}{'' if fast else ': some pairs send over PCIe'}"
    fix = (
        "keep parallel.tp, ep and cp within GPUs that NVLink joins; if the machine has NVLink, see nvidia-smi nvlink "
        "--status"
    )
    return judged("NVLink", result, fast, fix)


def _nearest_cards(cards: Table, needs: Needs) -> Finding:
    far = [gpu for gpu, row in cards.items() if not NEAR & set(row.values())]
    count = len({card for row in cards.values() for card in row})
    result = f"{count}; {f'none is near {", ".join(far)}' if far else 'each GPU has one nearby'}"
    fix = "choose GPUs beside a network card, or see in the BIOS which slots share a root complex"
    return judged("network cards", result, not far or needs.nodes == 1, fix)


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device: `state` such as ACTIVE, `rate` in Gb/s, `layer` InfiniBand or Ethernet (RoCE)."""

    name: str
    state: str
    rate: float
    layer: str


def ports(machine: Machine) -> list[Port]:
    """Return the ports of RDMA devices, from the files that ibstat reads too."""
    result = []
    for path in machine.folders("sys/class/infiniband/*/ports/*"):
        folder = path.relative_to(machine.root)
        state = (machine.read(f"{folder}/state") or "").partition(":")[2].strip()
        rate = re.match(r"[\d.]+", machine.read(f"{folder}/rate") or "")
        layer = machine.read(f"{folder}/link_layer") or "unknown"
        result.append(Port(f"{path.parent.parent.name}/{path.name}", state, float(rate[0]) if rate else 0.0, layer))
    return result


def rdma_checks(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Check InfiniBand and RoCE. One node needs none."""
    known, several = ports(machine), needs.nodes > 1
    if not known:
        fix = "load the driver of the network cards; without RDMA, NCCL uses TCP and a step takes much longer"
        state, fix = ("warn", fix) if several else ("skipped", "none needed")
        yield Finding("RDMA", "no InfiniBand or RoCE device", state, fix)
        return
    active = [port for port in known if port.state == "ACTIVE"]
    listed = ", ".join(f"{port.name} {port.layer} {port.state} {port.rate:g} Gb/s" for port in known)
    if not active:
        yield Finding("RDMA", listed, "warn", "check cables and the subnet manager (ibstat); NCCL will use TCP")
    elif len({port.rate for port in active}) > 1 or len(active) < len(known):
        fix = "name the fast ones: NCCL_IB_HCA=mlx5_0,mlx5_1; check the cables of the ports that are down"
        yield judged("RDMA", f"{listed}: not all alike", not several, fix)
    else:
        yield Finding("RDMA", listed)
    if active and not machine.folders("dev/infiniband/uverbs*"):
        fix = "start the container with --device /dev/infiniband (Kubernetes: the RDMA device plug-in)"
        yield Finding("RDMA devices", "/dev/infiniband has no uverbs device", "fail" if several else "warn", fix)
    elif active:
        modules = machine.read("proc/modules") or ""
        loaded = bool(re.search(r"^(nvidia_peermem|nv_peer_mem) ", modules, re.MULTILINE))
        fix = (
            "as root on the host: modprobe nvidia-peermem; not needed where NCCL_DEBUG=INFO prints 'GPU Direct RDMA "
            "Enabled' by DMA-BUF"
        )
        yield judged("GPUDirect RDMA", f"nvidia_peermem is {'' if loaded else 'not '}loaded", loaded, fix)
