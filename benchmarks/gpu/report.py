"""Writes one report file without secrets, to send to the developers."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megagrpo.cluster.doctor.checkup import CHECKED_PACKAGES, GPU_PACKAGES
from megagrpo.cluster.doctor.machine import Finding, Machine
from megagrpo.platform.install.requirements import installed_version
from megagrpo.platform.install.steps import VLLM

PRIVATE_VARIABLE = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|COOKIE|AUTH", re.IGNORECASE)
SHORTEST_SECRET, SHORTEST_NAME = 6, 3  # characters; shorter values would also hide ordinary words
NAMED = (
    r"""(?i)\b([\w.-]*(?:token|secret|passw\w*|api_?key|credential)[\w.-]*)(\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,;'"]+)"""
)
PATTERNS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{8,}", "<token>"),
        (r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}", r"\1 <token>"),
        (NAMED, r"\1\2<secret>"),
        (r"(\w+://)[^/\s@]+@", r"\1<user>@"),
        (r"\b[\w.+-]+@[\w-]+\.[\w.]+\b", "<address>"),
        (r"(?<![\w.])/(home|Users|users)/[^/\s:'\"]+", r"/\1/<user>"),
        (r"\b(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]{20,}", "<uuid>"),
        (r"<(serial|board_id|uuid|process_name)>[^<]*</\1>", r"<\1/>"),
        (r"\b(?:10|100|169|172|192)\.\d{1,3}\.\d{1,3}\.\d{1,3}\b", "<address>"),
        (r"(?<=://)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b", "<address>"),
    )
)
KEPT_VARIABLES = re.compile(
    r"(CUDA|NCCL|NVTE|TORCH|PYTORCH|VLLM|OMP|MKL|GLOO|HF_HUB|MEGAGRPO|SLURM_N|LD_LIBRARY|TRITON|UCX|FI)_?\w*"
)


def redact(text: str, environment: Mapping[str, str]) -> str:
    """Return `text` without secret values, tokens, user and host names, home folders, addresses, serial numbers."""
    for value in sorted(
        {value for name, value in environment.items() if PRIVATE_VARIABLE.search(name)}, key=len, reverse=True
    ):
        if len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "<secret>")
    home = os.path.expanduser("~")
    for folder in {environment.get("HOME", ""), home}:
        if len(folder) > SHORTEST_NAME:
            text = text.replace(folder, "~")
    for pattern, replacement in PATTERNS:
        text = pattern.sub(replacement, text)
    for name, replacement in ((_user(environment), "<user>"), (socket.gethostname(), "<host>")):
        if len(name) >= SHORTEST_NAME and name not in ("root", "localhost"):
            text = re.sub(rf"(?<![\w]){re.escape(name)}(?![\w])", replacement, text)
    return text


def _user(environment: Mapping[str, str]) -> str:
    try:
        return environment.get("USER") or getpass.getuser()
    except (KeyError, OSError):
        return ""


def report(machine: Machine, findings: Sequence[Finding], **more: Any) -> dict[str, Any]:
    """Return a report's content: findings, versions, variables, outputs of commands, and `more`, not yet redacted."""
    packages = ("megagrpo", *VLLM.values(), *CHECKED_PACKAGES, *GPU_PACKAGES)
    environment = machine.environment
    return {
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: installed_version(name) for name in packages if installed_version(name)},
        "variables": {
            name: "<secret>" if PRIVATE_VARIABLE.search(name) else value
            for name, value in sorted(environment.items())
            if KEPT_VARIABLES.fullmatch(name)
        },
        "findings": [asdict(finding) for finding in findings],
        "outputs": machine.outputs,
        "errors": machine.errors,
        **more,
    }


def write_report(file: Path, content: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Write a report as one JSON file without secrets, readable by its owner only. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        json.dump(redacted(content, environment), out, indent=1)
        out.write("\n")


def redacted(content: Any, environment: Mapping[str, str]) -> Any:
    """Return `content` with each text redacted, the keys of mappings included."""
    if isinstance(content, str):
        return redact(content, environment)
    if isinstance(content, Mapping):
        return {redact(str(key), environment): redacted(value, environment) for key, value in content.items()}
    if isinstance(content, Sequence):
        return [redacted(one, environment) for one in content]
    return content
