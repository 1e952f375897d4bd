"""The same job on two hosts that share neither loopback nor interfaces, like cluster hosts: each has its own network,
with one cable between them. `make test-slurm` runs it."""

import json
import time
from pathlib import Path

import pytest

from tests.e2e import world
from tests.slurm import pretend_cluster
from tests.slurm.pretend_cluster import processes_of, told
from tests.slurm.test_slurm import STEPS, assert_same, steps_of, submit, wait, weights

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
CABLED = dict(interface="eth0", env={"OMP_NUM_THREADS": "1"})  # not the loopback of the file of one machine


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if reason := pretend_cluster.missing("ip", "nsenter"):
        pytest.skip(reason)
    with pretend_cluster.slurm(tmp_path_factory.mktemp("slurm"), networks=True) as wired:
        yield wired


@pytest.fixture(scope="module")
def whole(hosts, tmp_path_factory) -> Path:
    """A job without faults."""
    folder = tmp_path_factory.mktemp("whole")
    job = submit(folder, "whole", f"run.max_steps={STEPS}", **CABLED)
    wait(lambda: told(job, "JobState") == "COMPLETED", job, folder / "whole.out", "end of the undisturbed job")
    assert not processes_of(job)
    return folder


def test_hosts_that_only_a_cable_joins_take_the_steps_of_one_machine(hosts, whole, tmp_path):
    started = world.start(tmp_path, f"run.max_steps={STEPS}", "run.save_steps=12", launched=True, NPROC="2")
    here = world.finish(started, tmp_path, seconds=300)
    assert here.code == 0, here.err
    assert_same(weights(whole / "whole"), weights(here.folder))
    (told_of,) = (whole / "whole.jobs").glob("*/attempt_0/urls/*.url")
    assert told_of.read_text().startswith(f"http://{hosts.address('n2')}:")


def test_two_hosts_share_one_server(hosts, tmp_path):
    """The second worker's messages, weights and reports cross the cable."""
    job = submit(tmp_path, "span", "rollout.tp=2", "rollout.nodes_per_server=2", "run.max_steps=3", **CABLED)
    wait(lambda: told(job, "JobState") == "COMPLETED", job, tmp_path / "span.out", "end of the job")
    (told_of,) = (tmp_path / "span.jobs").glob("*/attempt_0/urls/*.url")
    assert told_of.read_text().startswith(f"http://{hosts.address('n1')}:")
    assert all(list((tmp_path / "span.jobs").glob(f"*/attempt_0/{node}/vllm_0.log")) for node in ("n1", "n2"))
    rows = [json.loads(line) for line in (tmp_path / "span" / "metrics.jsonl").read_text().splitlines()]
    errors = [row["token_mult_prob_error"] for row in rows if "token_mult_prob_error" in row]
    assert len(errors) == 3 and max(errors) < 1.01
    assert not processes_of(job)


def test_a_cable_that_is_pulled_for_a_while_costs_time_and_nothing_else(hosts, whole, tmp_path):
    """The cable is unplugged at any point: gradients, weights and requests for rollouts all cross it."""
    job, printed = submit(tmp_path, "cut", f"run.max_steps={STEPS}", **CABLED), tmp_path / "cut.out"
    for step in (3, 9, 15):
        wait(lambda step=step: steps_of(tmp_path / "cut") >= step, job, printed, f"step {step}")
        hosts.cut("n2")
        time.sleep(5)
        hosts.cut("n2", off=False)
    wait(lambda: told(job, "JobState") == "COMPLETED", job, printed, "end of the job")
    assert told(job, "Restarts") == "0"
    assert_same(weights(tmp_path / "cut"), weights(whole / "whole"))
