"""The choices for each CPU, and the environment variable that overrides them."""

import subprocess
import sys
from dataclasses import replace

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


@pytest.mark.parametrize("flag", ["amx_tile", "amx_bf16", "avx10_2"])
def test_a_pretended_kind_permits_no_bf16_products_on_a_cpu_that_has_tiles(flag, monkeypatch):
    """oneDNN computes the bf16 products that the setting for AMD permits where the real CPU has AMX."""
    monkeypatch.setattr(cpu, "_flags", lambda: frozenset(["GenuineIntel", "avx512f", flag]))
    for kind, choices in cpu.CPU_KINDS.items():
        monkeypatch.setenv(cpu.VARIABLE, kind)
        assert cpu.this_cpu() == replace(choices, float32_by_onednn=False)


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
    expected = "highest" if cpu.has_amx() else "medium"
    done = subprocess.run([sys.executable, "-c", MATMUL], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [expected], done.stderr
