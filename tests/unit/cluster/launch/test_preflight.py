"""megagrpo/cluster/launch/preflight.py: problems of a node, and differences between nodes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.cluster.launch import preflight


def check(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    where = ["--folder", str(folder / "run"), "--report", str(folder / "nodes"), "--master", "127.0.0.1:0"]
    command = [sys.executable, "-m", "megagrpo.cluster.launch.preflight", *where, *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_a_node_that_is_as_it_must_be_passes(tmp_path):
    ended = check(tmp_path, "--interface", "lo", SLURMD_NODENAME="n1")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads((tmp_path / "nodes" / "n1.json").read_text())["torch"].startswith("2.")
    assert not any((tmp_path / "run").iterdir())


def test_every_problem_of_a_node_is_told_at_once(tmp_path):
    (tmp_path / "run").touch()
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        words = ["--gpus", "8", "--interface", "lo,nosuch0", "--master", f"127.0.0.1:{busy.getsockname()[1]}"]
        settings = dict(
            PYTORCH_ALLOC_CONF="expandable_segments:True", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False"
        )
        ended = check(tmp_path, *words, CUDA_VISIBLE_DEVICES="", SLURMD_NODENAME="n1", **settings)
    assert ended.returncode == 1
    for problem in (
        "preflight: n1: GPUs: 0 are visible, but the job uses 8; check nvidia-smi",
        "preflight: n1: interface: nosuch0 does not exist on this node",
        "preflight: n1: PYTORCH_CUDA_ALLOC_CONF: torch and vLLM read PYTORCH_ALLOC_CONF first, which has another value",
        "preflight: n1: run.output_dir:",
        "Address already in use",
    ):
        assert problem in ended.stderr, problem


def test_a_python_without_the_packages_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "NEEDED_MODULES", ("json", "no_such_package", "no_such_package.core"))
    both = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")  # no problem
    problems = preflight.node_problems(tmp_path, 0, [], both)
    assert [problem.partition(":")[0] for problem in problems] == ["no_such_package", "no_such_package.core"]


@pytest.mark.parametrize(
    ("gpu", "environment", "told"),
    [
        ("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)", {}, False),
        ("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, True),
        ("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, False),
        ("GPU 0: NVIDIA B200 (UUID: GPU-1)", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, False),
    ],
)
def test_one_connection_is_asked_for_where_messages_and_products_overlap(gpu, environment, told, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_nvidia_smi", lambda *arguments: [gpu])
    problems = preflight.node_problems(tmp_path, 1, [], environment, one_connection=True)
    assert [problem.partition(":")[0] for problem in problems] == ["CUDA_DEVICE_MAX_CONNECTIONS"] * told
    assert preflight.node_problems(tmp_path, 1, [], environment) == []


def test_the_other_apex_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "installed_version", lambda package: "0.9.10.dev0" if package == "apex" else "")
    assert [problem.partition(":")[0] for problem in preflight.node_problems(tmp_path, 0, [], {})] == ["apex"]


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "MIN_FREE_GIB", 1e9)
    assert "GiB free, but a run needs at least" in preflight.node_problems(tmp_path, 0, [], {})[0]


def test_nodes_with_other_packages_are_named():
    same = preflight.node_versions()
    reports = {"n1": same, "n2": same | {"torch": "1.0"}, "n3": same}
    (problem,) = preflight.version_differences(reports)
    assert problem == f"torch: {same['torch']} on n1 n3, 1.0 on n2; use one environment on all nodes"
    assert preflight.version_differences({"n1": same, "n2": dict(same)}) == []


def test_nodes_that_do_not_share_the_folder_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "REPORT_TIMEOUT", 0.1)
    (tmp_path / "n1.json").write_text(json.dumps(preflight.node_versions()))
    (problem,) = preflight._compare_reports(tmp_path, 2)
    assert "only n1 of 2 nodes reported in" in problem


@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("0", 1), ("", 0)])
def test_gpus_are_those_that_are_visible(visible, count, monkeypatch):
    monkeypatch.setattr(preflight, "_nvidia_smi", lambda *words: ["GPU 0: X (UUID: a)", "GPU 1: X (UUID: b)"])
    assert len(preflight.visible_gpu_lines({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})) == count


def test_every_node_tries_to_reach_the_first(tmp_path, monkeypatch, capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ["--folder", str(tmp_path / "run"), "--report", str(tmp_path / "nodes"), "--master", master, "--nodes", "2"]
    monkeypatch.setattr(preflight, "CONNECT_TIMEOUT", 0.5)
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert preflight.main(words) == 1
    assert f"preflight: n2: master: cannot connect to {master}" in capsys.readouterr().err
    first = os.environ | {"SLURMD_NODENAME": "n1", "SLURM_NODEID": "0"}
    (tmp_path / "nodes" / "n2.json").unlink()
    monkeypatch.setattr(preflight, "CONNECT_TIMEOUT", 20)
    with subprocess.Popen([sys.executable, "-m", "megagrpo.cluster.launch.preflight", *words], env=first) as other:
        assert preflight.main(words) == 0
        assert other.wait(20) == 0
