"""The choices for each CPU, and the environment variable that overrides them."""

import subprocess
import sys

import pytest

from megagrpo.config import ConfigError
from megagrpo.platform import device
from megagrpo.platform.device import cpu
from tests.unit.for_each import for_each

MATMUL = "import megagrpo.platform.parallel, torch; print(torch.get_float32_matmul_precision())"


@for_each(
    ("flags", "kind"),
    [
        ("GenuineIntel avx512f", "intel"),
        ("GenuineIntel avx512f avx512_bf16", "intel_amx"),
        ("GenuineIntel avx512f avx512_bf16 amx_bf16", "intel_amx"),
        ("AuthenticAMD avx2", "intel"),
        ("AuthenticAMD avx512f", "amd"),
        ("AuthenticAMD avx512f avx512_bf16", "amd_bf16"),
        ("AuthenticAMD avx512f avx512_bf16 amx_bf16", "intel_amx"),
        ("", "intel"),
    ],
)
def test_the_kind_follows_vendor_and_instructions(flags, kind, monkeypatch):
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    monkeypatch.setattr(cpu, "_flags", lambda: frozenset(flags.split()))
    assert cpu.kind() == kind


def test_the_kinds_cover_every_combination_of_choices_once():
    assert len(set(cpu.CPU_KINDS.values())) == len(cpu.CPU_KINDS) == 4


def test_the_flags_of_this_machine_are_read():
    assert "vendor_id" not in cpu._flags()
    assert any(vendor in cpu._flags() for vendor in ("GenuineIntel", "AuthenticAMD")) or not cpu._flags()


def test_an_unknown_kind_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv(cpu.VARIABLE, "zen")
    with pytest.raises(
        ConfigError, match="MEGAGRPO_CPU: 'zen' is not a kind of CPU; use one of intel, intel_amx, amd, amd_bf16"
    ):
        cpu.this_cpu()


@pytest.mark.skipif(device.has_gpu(), reason="nothing is set on a GPU")
def test_a_fresh_process_sets_the_float32_products_of_its_kind(monkeypatch):
    monkeypatch.setenv(cpu.VARIABLE, "amd_bf16")
    done = subprocess.run([sys.executable, "-c", MATMUL], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["medium"], done.stderr
