"""Colocated servers on two hosts that share neither loopback nor interfaces: each host has a rank, half of the model's
layers, and a vLLM server, whose weights come from files of its own host. Needs root and iproute2; `make test-slurm`
runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import world
from tests.slurm.pretend_cluster import Networks, free_ports
from tests.slurm.test_slurm import assert_same

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3000)]
STEPS = 2
HALVES = ["parallel.pp=2", f"run.max_steps={STEPS}", f"run.save_steps={STEPS}"]
BESIDE = ["run.nodes=2", "rollout.placement=colocated", "rollout.weight_sync_transport=auto", "rollout.servers=2"]
# two vLLM servers start at once on a busy machine
PATIENT = ["rollout.startup_timeout=1200", "rollout.weight_sync_timeout=600"]


@pytest.fixture(scope="module")
def hosts():
    if os.geteuid() or subprocess.run(["ip", "-V"], capture_output=True).returncode:
        pytest.skip("needs root and iproute2")
    with Networks(["n1", "n2"]) as wired:
        yield wired


def start(hosts: Networks, output: Path, *overrides: str) -> list[subprocess.Popen]:
    """The run with one rank on each host."""
    words = [str(world.folder() / "config.yaml"), f"run.output_dir={output}", "run.name=run", *overrides]
    master = f"{hosts.address('n1')}:{free_ports(1)[0]}"
    token = output.with_suffix(".token")
    token.write_text("0" * 64)
    token.chmod(0o600)
    started = []
    for index, name in enumerate(hosts.names):
        command = [
            *hosts.inside(name),
            sys.executable,
            "-m",
            "megagrpo.cluster.launch.node",
            "--nodes",
            "2",
            "--ranks",
            "1",
            "--master",
            master,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLURM_NODEID": str(index), "GLOO_SOCKET_IFNAME": "eth0"}
        environment["MEGAGRPO_TOKEN_FILE"] = str(token)
        printed = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(subprocess.Popen([*command, *words], env=environment, start_new_session=True, **printed))
    return started


def test_two_hosts_with_servers_beside_their_ranks_end_with_the_bits_of_one_host(hosts, tmp_path):
    on_two = start(hosts, tmp_path / "two", *HALVES, *BESIDE, *PATIENT)
    printed = [process.communicate(timeout=1500)[0] for process in on_two]
    assert [process.returncode for process in on_two] == [0, 0], "\n".join(printed)
    assert "weight sync: shared_memory (each node's servers get weights from its ranks)" in printed[0]
    on_one = world.finish(
        world.start(tmp_path / "one", *HALVES, launched=True, NPROC="2"), tmp_path / "one", seconds=600
    )
    assert on_one.code == 0, on_one.err
    saved = [tmp_path / folder / "run" / "checkpoints" / f"step_{STEPS:06d}" for folder in ("two", "one")]
    assert_same(*map(world.plain_tensors, saved))
    assert all((tmp_path / "two" / "run" / f"vllm_{number}.log").exists() for number in (0, 1))
