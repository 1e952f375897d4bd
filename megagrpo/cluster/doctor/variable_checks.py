"""Checks environment variables that make a run slow, wrong or noisy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from megagrpo.cluster.doctor.gpu_checks import Gpu
from megagrpo.cluster.doctor.machine import Finding, Machine, judged
from megagrpo.cluster.doctor.needs import Needs
from megagrpo.cluster.launch.preflight import BLACKWELL
from megagrpo.platform.process.environment import PASSED, REFUSED, REMOVED, TABLE, judge, row_of


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
