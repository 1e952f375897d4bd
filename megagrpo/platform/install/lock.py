"""Writes the constraint files with uv: `make lock`. Versions that still fit stay; `make lock ARGS=--upgrade` takes the
newest ones."""

from __future__ import annotations

import subprocess
import sys

from megagrpo.platform.install.requirements import CHECKOUT, KINDS, all_requirements, constraints

NOT_WITH = {"cpu": {"gpu", "te"}, "gpu": {"cpu", "cpu-engine"}}


def extras(kind: str) -> list[str]:
    """Return the extras that one environment of `kind` can hold together."""
    return sorted(all_requirements().keys() - NOT_WITH[kind] - {""})


def command(kind: str) -> list[str]:
    """Return the command that writes the constraint file of `kind`. The header of the file names `make lock`, and no
    path or address."""
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


def main(arguments: list[str]) -> int:
    """Write both files and return the exit code of the first command that fails."""
    for kind in KINDS:
        if code := subprocess.run([*command(kind), *arguments], cwd=CHECKOUT, stdout=subprocess.DEVNULL).returncode:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
