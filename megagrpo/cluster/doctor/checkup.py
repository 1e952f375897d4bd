"""Runs all checks of a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megagrpo.cluster.doctor.gpu_checks import gpu_checks, has_nvidia_card, nvidia_state, visible_gpus
from megagrpo.cluster.doctor.host_checks import cpu_checks, limit_checks, memory_checks, network_checks
from megagrpo.cluster.doctor.machine import Finding, Machine
from megagrpo.cluster.doctor.needs import Needs
from megagrpo.cluster.doctor.packages import library_path_checks, package_checks, toolkit_checks, torch_cuda
from megagrpo.cluster.doctor.variable_checks import variable_checks


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
