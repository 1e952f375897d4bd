"""The job script on a real Slurm with two simulated nodes and a stand-in for Python: time limits, arrays, dependencies
and failing steps. `make test-slurm` runs it; `test_slurm.py` runs the real trainer and servers."""

import os
import re
import subprocess
import sys
import time

import pytest
import yaml

from megagrpo.__main__ import main
from megagrpo.cluster.launch.job import job_folder
from tests.e2e.world import wait_for
from tests.slurm.pretend_cluster import cluster as cluster
from tests.slurm.pretend_cluster import command_output, processes_of, start_now, told

ROOT = job_folder()
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
# Servers end when a file exists; the trainer of the first node counts steps up to the number in the file `until`, from
# its last step.
PYTHON = """#!/usr/bin/env bash
cd FOLDER || exit 9
case "$*" in
  "-m megagrpo.cluster.launch.preflight"* | "-m megagrpo plan"*) ;;
  "-m megagrpo serve"*)
    while [ $# -gt 0 ]; do [ "$1" = --urls ] && urls=$2; shift; done
    [ ! -e "unfit.$SLURMD_NODENAME" ] || { echo "no GPU" >"$urls/$SLURMD_NODENAME.failed"; exit 2; }
    echo http://127.0.0.1:1 >"$urls/$SLURMD_NODENAME.url"
    trap 'exit 0' TERM
    until [ -e "gone.$SLURMD_NODENAME" ]; do sleep 0.3; done
    exit 1 ;;
  "-m megagrpo.cluster.launch.node"*)
    ended=ended.$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
    if [ "$SLURM_NODEID" != 0 ]; then
      trap : TERM
      until [ -s "$ended" ]; do sleep 0.3; done
      exit "$(cat "$ended")"
    fi
    steps=$(cat steps 2>/dev/null || echo 0)
    echo "$MEGAGRPO_JOB begins at step $steps with $0"
    end() { echo "$steps" >steps; echo "$1" >"$ended"; echo "saved step $steps"; exit "$1"; }
    trap 'end 85' TERM
    while [ "$steps" -lt "$(cat until)" ]; do sleep 0.3; steps=$((steps + 1)); done
    end 0 ;;
esac
"""


@pytest.fixture
def submit(tmp_path, capfd):
    """Submit a job of two nodes with a server on each; return its number. Its output goes to `tmp_path`/job.out."""
    python = tmp_path / "python"
    python.write_text(PYTHON.replace("FOLDER", str(tmp_path)))
    python.chmod(0o755)
    (tmp_path / "until").write_text("100000")
    described = yaml.safe_load((ROOT / "launch" / "clusters" / "local_pretend.yaml").read_text())

    def send(*words: str, **keys) -> str:
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(described | {"python": str(python)} | keys))
        options = [
            f"run.output_dir={tmp_path}",
            "run.nodes=2",
            "rollout.placement=dedicated",
            "rollout.servers=2",
            *words,
        ]
        options += ["--cluster", str(tmp_path / "cluster.yaml"), "--sbatch", f"output={tmp_path}/job.out", "--submit"]
        assert main(["submit", str(ROOT / "configs" / "quickstart.yaml"), *options]) == 0
        return capfd.readouterr().out.split()[-1]

    return send


def begun(tmp_path) -> list[int]:
    """The steps at which trainers have started."""
    out = tmp_path / "job.out"
    return [int(step) for step in re.findall(r"begins at step (\d+)", out.read_text())] if out.exists() else []


def ends(job: str, state: str, seconds: float = 60) -> None:
    """Wait for a job to end in this state."""
    wait_for(lambda: told(job, "JobState") not in ("PENDING", "RUNNING", "COMPLETING"), f"end of job {job}", seconds)
    assert told(job, "JobState") == state


def test_a_job_that_slurm_warns_of_its_time_limit_goes_on_later_but_only_so_often(submit, tmp_path):
    job = submit("run.time_limit=0:02:00", lead_seconds=60, restarts=1)
    wait_for(lambda: told(job, "Reason") == "BeginTime" and not processes_of(job), "requeue", 120)
    saved = int((tmp_path / "steps").read_text())
    start_now(job)
    ends(job, "FAILED", 120)
    printed = (tmp_path / "job.out").read_text()
    assert begun(tmp_path) == [0, saved] and saved > 0 and told(job, "ExitCode") == "85:0", printed
    assert (
        printed.count("got SIGUSR1: the trainer saves and stops")
        == printed.count("the trainer ended with exit code 85")
        == 2
    )
    assert "requeueing the job" in printed and "restart limit 1 reached; submit the job again with --resume" in printed
    wait_for(lambda: not processes_of(job), "end of all processes", 5)


def test_a_job_by_hand_is_requeued_and_takes_its_arguments_again(submit, tmp_path):
    """`submit` is not called; its fixture makes the stand-in."""
    described = yaml.safe_load((ROOT / "launch" / "clusters" / "local_pretend.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(described | {"python": str(tmp_path / "python")}))
    words = [f"run.output_dir={tmp_path}", "run.nodes=2", "rollout.placement=dedicated", "rollout.servers=2"]
    options = ["--nodes=2", "--mem=8G", "--cpus-per-task=2", "--time=20", f"--output={tmp_path}/job.out"]
    sent = subprocess.run(
        ["sbatch", *options, "launch/train.sbatch", "configs/quickstart.yaml", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "MEGAGRPO_CLUSTER": str(tmp_path / "mine.yaml")},
        capture_output=True,
        text=True,
        check=True,
    )
    job = sent.stdout.split()[-1]
    wait_for(lambda: begun(tmp_path), "trainer", 60)
    command_output("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: told(job, "Reason") == "BeginTime" and not processes_of(job), "requeue", 60)
    saved = int((tmp_path / "steps").read_text())
    (tmp_path / "until").write_text(str(saved + 5))
    start_now(job)
    ends(job, "COMPLETED")
    assert begun(tmp_path) == [0, saved] and (tmp_path / "job.out").read_text().count("requeueing the job") == 1


def test_the_turns_of_an_array_and_the_jobs_that_depend_on_it(submit, tmp_path):
    array = submit("--sbatch", "array=0-1%1", restarts=0)
    wait_for(lambda: begun(tmp_path), "first task")
    after = {kind: submit("--resume", "--sbatch", f"dependency={kind}:{array}") for kind in ("afterok", "afternotok")}
    (tmp_path / "until").write_text("30")
    time.sleep(2)  # some steps, of 0.3 s
    command_output("scancel", "--batch", "--signal=USR1", f"{array}_0")
    ends(f"{array}_0", "FAILED")
    ends(f"{array}_1", "COMPLETED")
    ends(after["afternotok"], "COMPLETED")
    _, second, third = begun(tmp_path)
    assert 0 < second < 30 and third == 30  # the first task's share, then the rest, then nothing
    assert (tmp_path / "job.out").read_text().count(f"slurm-{array} begins") == 2
    wait_for(lambda: told(after["afterok"], "Reason") == "DependencyNeverSatisfied", "afterok that cannot be")


def test_a_job_outlives_the_servers_of_one_node_and_saves_when_all_are_gone(submit, tmp_path):
    job = submit()
    wait_for(lambda: begun(tmp_path), "trainer")
    (tmp_path / "gone.n2").touch()
    time.sleep(70)  # srun would end the rest of a step a minute after its first task
    assert told(job, "JobState") == "RUNNING"
    (tmp_path / "gone.n1").touch()
    ends(job, "FAILED")
    assert told(job, "ExitCode") == "1:0" and int((tmp_path / "steps").read_text()) > 0
    assert "all servers have ended and reached their restart limit" in (tmp_path / "job.out").read_text()


def test_one_node_whose_servers_do_not_start_ends_the_job(submit, tmp_path):
    (tmp_path / "unfit.n2").touch()
    job = submit()
    ends(job, "FAILED", 20)
    assert told(job, "ExitCode") == "1:0" and not begun(tmp_path)
    wait_for(lambda: not processes_of(job), "end of all processes", 5)
