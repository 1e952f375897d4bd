"""Runs all checks of a machine."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megagrpo.cluster.doctor.gpu_checks import Gpu, gpu_checks, has_nvidia_card, nvidia_state, visible_gpus
from megagrpo.cluster.doctor.host_checks import cpu_checks, limit_checks, memory_checks, network_checks
from megagrpo.cluster.doctor.machine import Finding, Machine, judged
from megagrpo.cluster.doctor.needs import Needs
from megagrpo.cluster.launch.preflight import BLACKWELL
from megagrpo.platform.install.requirements import constraints, installed_version
from megagrpo.platform.install.steps import VLLM
from megagrpo.platform.process.environment import PASSED, REFUSED, REMOVED, TABLE, judge, row_of


def is_gpu_machine(machine: Machine) -> bool:
    """Whether this machine has an NVIDIA GPU, with or without a driver."""
    state = nvidia_state(machine)
    return bool(state and state.gpus) or has_nvidia_card(machine)


def check_up(machine: Machine, needs: Needs) -> list[Finding]:
    """Return the findings of all checks, in order. A check that raises becomes a warning."""
    gpu, cuda = is_gpu_machine(machine), torch_cuda()
    state = nvidia_state(machine)
    gpus = visible_gpus(state.gpus, machine.environment) if state else []
    parts: list[Callable[[], Iterable[Finding]]] = [lambda: gpu_checks(machine, needs, cuda)]
    parts += [lambda: package_checks("gpu" if gpu else "cpu")]
    if gpu:
        parts += [lambda: toolkit_checks(machine, cuda), lambda: library_path_checks(machine)]
    if needs.unseen:
        unseen = Finding("model", f"its size is unknown here: {needs.unseen}", "skipped", "fetch it first")
        parts.append(lambda: [unseen])
    parts += [
        lambda: memory_checks(machine, needs),
        lambda: limit_checks(machine, needs, gpu),
        lambda: cpu_checks(machine, needs, not gpu),
        lambda: network_checks(machine, needs),
        lambda: variable_checks(machine, needs, gpus),
    ]
    return [finding for part in parts for finding in _guarded(part)]


def _guarded(part: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of one part. An exception becomes a warning, so that the other parts are still checked."""
    try:
        return list(part())
    except Exception as error:
        result = f"a check failed: {type(error).__name__}: {error}"
        return [Finding("doctor", result, "warn", "add --json, and report the error")]


def variable_checks(machine: Machine, needs: Needs, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Check this shell's environment by the table of `platform/process/environment.py`: what a run ignores or refuses,
    what harms, and rows with a set variable. Without any `gpus` variables of CUDA and NCCL harm nothing."""
    environment = machine.environment
    verdicts = judge(environment)
    findings = []
    for verdict in verdicts:
        result = f"{', '.join(verdict.names)}, {verdict.fate}: {verdict.reason}"
        state = "fail" if verdict.fate == REFUSED else "warn"
        findings.append(Finding(verdict.names[0], result, state, verdict.fix))
    wrong = [
        _one_connection(environment, needs, gpus) if gpus else None,
        _threads(environment),
        _python_path(environment),
    ]
    findings += [*_harmful(environment, bool(gpus)), *(finding for finding in wrong if finding is not None)]
    judged = {name for verdict in verdicts for name in verdict.names}
    yield from findings or [Finding("environment", "no harmful variable is set")]
    for row in TABLE:
        if names := [name for name in environment if row_of(name) is row and name not in judged]:
            fate = row.fate if row.fate == REMOVED else PASSED
            yield Finding("variables", f"{', '.join(names)}: {fate}, {row.effect}")


def _harmful(environment: dict[str, str], on_gpus: bool) -> Iterator[Finding]:
    """Yield a warning for each variable with a value that makes a run slow or wrong."""
    for name, value in environment.items():
        row = row_of(name)
        if row is None or row.harmful is None or not value or (row.on_gpus and not on_gpus):
            continue
        if row.harmful in ("", value.upper()):
            yield Finding(name, f"{value}: {row.effect}", "warn", row.fix)


def _one_connection(environment: dict[str, str], needs: Needs, gpus: Sequence[Gpu]) -> Finding | None:
    name, older = "CUDA_DEVICE_MAX_CONNECTIONS", any(not BLACKWELL.search(gpu.text("product_name")) for gpu in gpus)
    value = environment.get(name)
    if needs.one_connection and older and value not in (None, "1"):
        result = f"{value}, but {needs.source} uses tensor or context parallelism on GPUs before Blackwell"
        return Finding(name, result, "warn", "unset it: the ranks' launcher sets it to 1")
    if value == "1" and not (needs.one_connection and older):
        result = "1; only tensor and context parallelism before Blackwell need it"
        return judged(name, result, needs.source == "any run", "unset it")
    return None


def _threads(environment: dict[str, str]) -> Finding | None:
    value = environment.get("OMP_NUM_THREADS", "")
    if value.isdigit() and int(value) > (os.cpu_count() or 1):
        result = f"{value}, but the machine has {os.cpu_count()} cores"
        return Finding("OMP_NUM_THREADS", result, "warn", "unset it: the ranks share the cores")
    return None


def _python_path(environment: dict[str, str]) -> Finding | None:
    folders = [name for name in environment.get("PYTHONPATH", "").split(":") if re.search("(site|dist)-packages", name)]
    if folders:
        result = f"{', '.join(folders)}: its packages come before those of this environment"
        return Finding("PYTHONPATH", result, "warn", "unset it, or start with python -P")
    return None


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
