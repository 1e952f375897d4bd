"""Checks environment variables that make a run slow, wrong or noisy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from megagrpo.doctor.gpus import GpuState
from megagrpo.doctor.machine import Finding, Machine
from megagrpo.doctor.needs import Needs
from megagrpo.launch.preflight import BLACKWELL

# variable -> (harmful value, or "" for any; its effect; fix)
HURTS = {
    "CUDA_LAUNCH_BLOCKING": ("1", "each kernel waits for the last one: many times slower", "unset it"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node send through host memory", "unset it"),
    "NCCL_SHM_DISABLE": ("1", "NCCL sends through network sockets within a node", "unset it"),
    "NCCL_IB_DISABLE": ("1", "NCCL uses TCP between nodes", "unset it, unless the nodes have no RDMA"),
    "NCCL_NET_GDR_LEVEL": ("LOC", "NCCL copies through host memory before RDMA", "unset it"),
    "NCCL_ALGO": ("", "an algorithm that a collective lacks is an error", "unset it"),
    "NCCL_PROTO": ("", "it forbids protocols that NCCL would choose by size", "unset it"),
    "NCCL_DEBUG": ("TRACE", "NCCL writes a line for each call", "use NCCL_DEBUG=WARN"),
    "NCCL_ASYNC_ERROR_HANDLING": ("0", "a failed collective hangs and raises no error", "unset it"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "a failed collective hangs and raises no error", "unset it"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host waits for each collective", "unset it"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "each allocation is a call of cudaMalloc", "unset it"),
    "CUBLAS_WORKSPACE_CONFIG": ("", "products may use slower kernels", "use run.deterministic instead"),
    "NVTE_FLASH_ATTN": ("0", "Transformer Engine has fewer attention kernels to choose from", "unset it"),
    "NVTE_FUSED_ATTN": ("0", "without flash-attn, attention keeps all scores in memory", "unset it"),
    "PYTORCH_JIT": ("0", "scripted functions of Megatron run unfused", "unset it"),
    "TORCHDYNAMO_DISABLE": ("1", "vLLM does not compile its model", "unset it"),
    "TRITON_INTERPRET": ("1", "Triton kernels run in Python", "unset it"),
}


def variable_checks(machine: Machine, needs: Needs, gpus: Sequence[GpuState]) -> Iterator[Finding]:
    """Check the environment of this shell. Without any `gpus` variables of CUDA and NCCL do not matter."""
    environment = machine.environment
    wrong = [_one_connection(environment, needs, gpus), *(_hurts(environment, name) for name in HURTS)] if gpus else []
    wrong += [_threads(environment), _python_path(environment)]
    findings = [finding for finding in wrong if finding is not None]
    yield from findings or [Finding("environment", "no harmful variable is set")]


def _hurts(environment: dict[str, str], name: str) -> Finding | None:
    bad, effect, fix = HURTS[name]
    value = environment.get(name, "")
    if not value or (bad and value.upper() != bad):
        return None
    return Finding(name, f"{value}: {effect}", "warn", fix)


def _one_connection(environment: dict[str, str], needs: Needs, gpus: Sequence[GpuState]) -> Finding | None:
    name, older = "CUDA_DEVICE_MAX_CONNECTIONS", any(not BLACKWELL.search(gpu.name) for gpu in gpus)
    value = environment.get(name)
    if needs.one_connection and older and value not in (None, "1"):
        found = f"{value}, but {needs.source} uses tensor or context parallelism on GPUs before Blackwell"
        return Finding(name, found, "warn", "unset it: the ranks' launcher sets it to 1")
    if value == "1" and not (needs.one_connection and older):
        found = "1; only tensor and context parallelism before Blackwell need it"
        return Finding(name, found, "warn" if needs.source != "any run" else "ok", "unset it" if needs.source != "any run" else "")
    return None


def _threads(environment: dict[str, str]) -> Finding | None:
    value = environment.get("OMP_NUM_THREADS", "")
    if value.isdigit() and int(value) > (os.cpu_count() or 1):
        return Finding(
            "OMP_NUM_THREADS", f"{value}, but the machine has {os.cpu_count()} cores", "warn", "unset it: the ranks share the cores"
        )
    return None


def _python_path(environment: dict[str, str]) -> Finding | None:
    folders = [name for name in environment.get("PYTHONPATH", "").split(":") if "site-packages" in name or "dist-packages" in name]
    if folders:
        found = f"{', '.join(folders)}: its packages come before those of this environment"
        return Finding("PYTHONPATH", found, "warn", "unset it, or start with python -P")
    return None
