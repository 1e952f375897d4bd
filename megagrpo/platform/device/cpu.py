"""Choices that depend on the CPU: four choices of a run without a GPU, made by one function.

A float32 run computes the same on every CPU except for rounding. These four choices differ: the meaning of
`model.precision: auto`, vLLM's compute dtype, whether bf16 products are widened to float32, and the library that
multiplies float32 matrices.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from megagrpo.config import ConfigError
from megagrpo.platform.process.variables import ENVIRONMENT

VARIABLE = "MEGAGRPO_CPU"
"""Environment variable that names a kind of `CPU_KINDS` in place of the kind of this CPU."""


@dataclass(frozen=True)
class Cpu:
    """The choices for one kind of CPU."""

    multiplies_bf16: bool
    """The CPU has bf16 instructions (avx512_bf16 or amx_bf16): `precision: auto` means bf16, and vLLM uses bf16 where
    the trainer does. Without them vLLM uses float32, and so do the trainer's bf16 products, rounded once."""

    float32_by_onednn: bool
    """oneDNN multiplies float32 matrices. On AMD CPUs MKL uses AVX2, not AVX-512 (measured 2.3 times slower, Zen 4).
    torch's setting for it permits bf16 products, which oneDNN computes on CPUs with AMX: there it is never set."""


CPU_KINDS = {
    "intel": Cpu(multiplies_bf16=False, float32_by_onednn=False),
    "intel_amx": Cpu(multiplies_bf16=True, float32_by_onednn=False),
    "amd": Cpu(multiplies_bf16=False, float32_by_onednn=True),
    "amd_bf16": Cpu(multiplies_bf16=True, float32_by_onednn=True),
}
"""Every kind that differs in a choice. A CPU of another vendor or without AVX-512 counts as `intel`."""


def this_cpu() -> Cpu:
    """Return the choices for this CPU or the kind in MEGAGRPO_CPU. Raises ConfigError when that names no kind."""
    choices = CPU_KINDS[kind()]
    return replace(choices, float32_by_onednn=choices.float32_by_onednn and not has_amx())


def has_amx() -> bool:
    """Return whether this CPU, whatever MEGAGRPO_CPU names, has matrix tiles: oneDNN may then round float32 to bf16."""
    return any(flag.startswith(("amx", "avx10")) for flag in _flags())


def has_fp16() -> bool:
    """Return whether this CPU, whatever MEGAGRPO_CPU names, multiplies fp16."""
    return bool(_flags() & {"avx512_fp16", "amx_fp16"})


def kind() -> str:
    """Return the name in `CPU_KINDS` of this CPU's kind, or the one that MEGAGRPO_CPU names. Raises ConfigError when
    MEGAGRPO_CPU names no kind."""
    named, flags = ENVIRONMENT.get(VARIABLE), _flags()
    if named and named not in CPU_KINDS:
        raise ConfigError(f"{VARIABLE}: {named!r} is not a kind of CPU; use one of {', '.join(CPU_KINDS)}, or unset it")
    if named:
        return named
    bf16 = bool(flags & {"avx512_bf16", "amx_bf16"})
    if "AuthenticAMD" in flags and "avx512f" in flags and not has_amx():
        return "amd_bf16" if bf16 else "amd"
    return "intel_amx" if bf16 else "intel"


@functools.cache
def _flags() -> frozenset[str]:
    """Return this CPU's vendor and instruction-set flags as Linux reports them; empty without /proc/cpuinfo."""
    try:
        with open("/proc/cpuinfo") as lines:
            fields = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "vendor_id"))]
    except OSError:
        return frozenset()
    return frozenset(word for field in fields for word in field)
