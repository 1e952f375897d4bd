"""Checks packages against the tested versions, and CUDA builds of torch, NCCL and the compiler against each other."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from megagrpo.cluster.doctor.machine import Finding, Machine, judged
from megagrpo.platform.install.requirements import constraints, installed_version
from megagrpo.platform.install.steps import VLLM

CHECKED_PACKAGES = ("torch", "megatron-core", "transformers", "triton")
GPU_PACKAGES = ("transformer-engine", "transformer-engine-torch", "flash-attn", "nvidia-nccl-cu13", "nvidia-cudnn-cu13")
OPTIONAL_PACKAGES = ("transformer-engine", "transformer-engine-torch", "flash-attn")
TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*'([\d.]+)'", re.MULTILINE)  # in torch/version.py
NVCC_RELEASE = re.compile(r"release (\d+)\.(\d+)")  # in the output of nvcc --version


def torch_cuda() -> str:
    """Return the CUDA version of the installed torch, such as 13.0, without importing torch; empty for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        match = TORCH_CUDA.search(Path(spec.origin).with_name("version.py").read_text())
    except OSError:
        return ""
    return match[1] if match else ""


def pinned_versions(kind: str) -> dict[str, str]:
    """Return package -> version that megagrpo is tested with, for `kind`: cpu or gpu."""
    lines = (line.split(";")[0].strip() for line in constraints(kind).read_text().splitlines())
    return dict(line.split("==", 1) for line in lines if "==" in line)


def package_checks(kind: str) -> Iterator[Finding]:
    """Check that the packages of a machine of `kind`, `cpu` or `gpu`, are installed in the tested versions."""
    tested, other = pinned_versions(kind), {"cpu": "gpu", "gpu": "cpu"}[kind]
    if not installed_version(VLLM[kind]) and installed_version(VLLM[other]):
        result = f"{VLLM[other]} {installed_version(VLLM[other])}, which is vLLM's {other.upper()} build"
        fix = f"use a new environment: pip uninstall {VLLM[other]}, then megagrpo install {kind}"
        yield Finding(VLLM[kind], result, "fail", fix)
    else:
        yield package_check(VLLM[kind], installed_version(VLLM[kind]), tested.get(VLLM[kind], ""), kind)
    for name in CHECKED_PACKAGES + (GPU_PACKAGES if kind == "gpu" else ()):
        yield package_check(name, installed_version(name), tested.get(name, ""), kind)
    version_of_apex = installed_version("apex")
    if importlib.util.find_spec("amp_C"):
        yield Finding("apex", f"NVIDIA's {version_of_apex}: its FusedAdam and FusedRMSNorm are used if they run here")
    elif version_of_apex:
        fix = "uninstall it if it is another project's package (docs/gpu_install.md)"
        yield Finding("apex", f"{version_of_apex} without amp_C, which NVIDIA's apex has: not used", "warn", fix)


def package_check(name: str, current: str, tested: str, kind: str) -> Finding:
    """Compare the installed version with the tested one, without build tags; empty: not installed, or not pinned."""
    if not current and name in OPTIONAL_PACKAGES:
        fix = "megagrpo install gpu" if tested else "none needed: Transformer Engine uses cuDNN's attention"
        return Finding(name, "not installed", "warn" if tested else "skipped", fix)
    if not current:
        state = "fail" if name in (*VLLM.values(), "torch", "megatron-core", "transformers") else "warn"
        return Finding(name, "not installed", state, f"megagrpo install {kind}")
    if tested and current.partition("+")[0] != tested.partition("+")[0]:
        fix = f"megagrpo install {kind}, which installs the tested version"
        return Finding(name, f"{current}, tested with {tested}", "warn", fix)
    return Finding(name, current + ("" if tested else ", not pinned"))


def toolkit_checks(machine: Machine, cuda: str) -> Iterator[Finding]:
    """Check the CUDA compiler, if any, and the C++ compiler. Only packages that compile at run time need nvcc."""
    has_compilers = bool(shutil.which("cc") and shutil.which("c++"))
    fix = "Debian, Ubuntu: apt-get install build-essential; Triton compiles with cc"
    yield judged("C++ compiler", "found" if has_compilers else "cc or c++ is missing", has_compilers, fix)
    text = machine.run("nvcc", "--version")
    match = NVCC_RELEASE.search(text or "")
    if match is None:
        packaged = installed_version("nvidia-cuda-nvcc")
        missing = "no nvcc; only FlashInfer's kernels in vLLM compile with it"
        result = f"the package nvidia-cuda-nvcc {packaged}" if packaged else missing
        yield judged("CUDA toolkit", result, bool(packaged), "megagrpo install gpu brings one", "skipped")
    elif cuda and match[1] != cuda.partition(".")[0]:
        fix = f"put a CUDA {cuda} toolkit first on PATH (module load cuda/{cuda}), or take nvcc off PATH"
        yield Finding("CUDA toolkit", f"nvcc {match[1]}.{match[2]}, but torch is built for CUDA {cuda}", "warn", fix)
    else:
        yield Finding("CUDA toolkit", f"nvcc {match[1]}.{match[2]}")


def library_path_checks(machine: Machine) -> Iterator[Finding]:
    """Warn of an NCCL, cuDNN or cuBLAS in LD_LIBRARY_PATH, which would replace the ones of torch."""
    folders = [Path(name) for name in machine.environment.get("LD_LIBRARY_PATH", "").split(":") if name]
    names = ("libnccl.so.2", "libcudnn.so.9", "libcublas.so.13", "libcublas.so.12")
    replaced = [str(folder / name) for folder in folders for name in names if (folder / name).exists()]
    if replaced:
        fix = "unset LD_LIBRARY_PATH: these replace the libraries of torch"
        yield Finding("LD_LIBRARY_PATH", f"holds {', '.join(replaced)}", "warn", fix)
