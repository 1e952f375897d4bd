"""megagrpo submit on a real Slurm with two simulated nodes: one rank on each, a vLLM server on the second, weights from
rank to worker over gloo. `make test-slurm` runs it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from tests.e2e import world
from tests.slurm.pretend_cluster import cluster as cluster
from tests.slurm.pretend_cluster import command_output, processes_of, start_now, told

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
STEPS = 24
PARTS = ["run.nodes=2", "rollout.placement=dedicated", "rollout.weight_sync_transport=p2p", "run.save_steps=12"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of a job without faults."""
    folder = tmp_path_factory.mktemp("whole")
    job = submit(folder, "whole", f"run.max_steps={STEPS}")
    wait(lambda: told(job, "JobState") == "COMPLETED", job, folder / "whole.out", "end of the undisturbed job")
    assert not processes_of(job)
    return weights(folder / "whole")


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint of a run that has ended."""
    return world.plain_tensors(run / "checkpoints" / f"step_{STEPS:06d}")


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert len(expected) > 30 and found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def submit(output: Path, name: str, *overrides: str, signalled: bool = True, **cluster) -> str:
    """Submit the world's config as a job that writes to `output`/`name` and prints into `output`/`name`.out; return its
    number. Without `signalled` Slurm sends no signal before the time limit."""
    described = yaml.safe_load((world.REPOSITORY / "launch" / "clusters" / "local_pretend.yaml").read_text())
    output.mkdir(exist_ok=True)
    (output / f"{name}.cluster").write_text(yaml.safe_dump(described | {"python": sys.executable} | cluster))
    words = [str(world.folder() / "config.yaml"), f"run.output_dir={output}", f"run.name={name}", *PARTS, *overrides]
    words += [
        "--cluster",
        str(output / f"{name}.cluster"),
        "--sbatch",
        f"output={output}/{name}.out",
        *["--submit"] * signalled,
    ]
    sent = subprocess.run([sys.executable, "-m", "megagrpo", "submit", *words], capture_output=True, text=True)
    assert sent.returncode == 0, sent.stderr
    if not signalled:
        script = re.sub("#SBATCH --signal=.*\n", "", sent.stdout)
        sent = subprocess.run(["sbatch"], input=script, capture_output=True, text=True, check=True)
    return sent.stdout.split()[-1]


def steps_of(folder: Path) -> int:
    """Steps in the metrics of a run."""
    file = folder / "metrics.jsonl"
    return file.read_text().count('"reward":') if file.exists() else 0


def wait(happened, job: str, output: Path, what: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        failed = told(job, "JobState") in ("FAILED", "NODE_FAIL", "TIMEOUT")
        assert time.monotonic() < deadline and not failed, f"no {what}\n{output.read_text() if output.exists() else ''}"
        time.sleep(0.1)


def test_a_job_that_is_stopped_twice_ends_with_the_weights_of_one_that_is_not(whole, tmp_path):
    folder = tmp_path / "parts"
    job = submit(tmp_path, "parts", f"run.max_steps={STEPS}")
    wait(lambda: steps_of(folder) >= 3, job, tmp_path / "parts.out", "third step")
    # as near the time limit: the trainer saves, the script requeues
    command_output("scancel", "--batch", "--signal=USR1", job)
    wait(lambda: told(job, "JobState") == "PENDING", job, tmp_path / "parts.out", "requeue by the script")
    wait(lambda: not processes_of(job), job, tmp_path / "parts.out", "end of the first attempt", 30)
    saved = [path.name for path in (folder / "checkpoints").glob("step_*")]
    assert len(saved) == 1 and 3 <= int(saved[0].removeprefix("step_")) < STEPS
    first = int(saved[0].removeprefix("step_"))
    start_now(job)
    wait(lambda: steps_of(folder) >= first + 3, job, tmp_path / "parts.out", "step of the second attempt")
    command_output("scontrol", "requeue", job)  # as on preemption: SIGTERM to all processes at once
    wait(lambda: told(job, "JobState") == "PENDING", job, tmp_path / "parts.out", "requeue by Slurm")
    wait(lambda: not processes_of(job), job, tmp_path / "parts.out", "end of the second attempt", 60)
    second = max(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))
    assert first < second < STEPS  # the trainer has saved on SIGTERM
    start_now(job)
    wait(lambda: told(job, "JobState") == "COMPLETED", job, tmp_path / "parts.out", "end of the job")
    assert told(job, "Restarts") == "2"
    printed = (tmp_path / "parts.out").read_text()
    assert "requeueing the job" in printed and printed.count("resumed from") == 2
    attempts = sorted((tmp_path / "parts.jobs" / job).glob("attempt_*"))
    assert [path.name for path in attempts] == ["attempt_0", "attempt_1", "attempt_2"]
    assert all(
        (path / f"rank_{rank:05d}.log").exists() and (path / "n2" / "vllm_0.log").exists()
        for path in attempts
        for rank in (0, 1)
    )
    assert_same(weights(folder), whole)
    assert not processes_of(job)


SLOW = """
import os, time
from rewards import low_bytes as score

def low_bytes(completions, answer, **columns):
    time.sleep(len(completions) * (1.0 if os.path.exists({file!r}) else 0))  # 8 on each of two ranks: 8 s a step
    return score(completions, answer)
"""


def test_a_job_whose_time_is_over_has_saved_by_itself_and_ends_with_the_weights_of_one_that_had_time(whole, tmp_path):
    """The job stops when the measured checkpoint time and 15 s are left. On an idle machine this is less than half of
    the 105 s reserved without a measurement."""
    slow, printed = tmp_path / "slow", tmp_path / "limited.out"
    slow.touch()
    (tmp_path / "rewards.py").write_text((world.folder() / "rewards.py").read_text())
    (tmp_path / "slow_rewards.py").write_text(SLOW.format(file=str(slow)))
    options = [
        f"rewards.functions=[{{function: {tmp_path}/slow_rewards.py:low_bytes}}]",
        "rewards.timeout=60",
        "run.save_steps=1",
    ]
    job = submit(tmp_path, "limited", f"run.max_steps={STEPS}", "run.time_limit=0:04:00", *options, signalled=False)
    wait(
        lambda: "ended with exit code" in (printed.read_text() if printed.exists() else ""),
        job,
        printed,
        "end of the first attempt",
    )
    left = datetime.fromisoformat(told(job, "EndTime")) - datetime.now()
    rows = [json.loads(line) for line in (tmp_path / "limited" / "metrics.jsonl").read_text().splitlines()]
    # of a step with its checkpoint
    longest = max(later["wall_time"] - earlier["wall_time"] for earlier, later in pairwise(rows))
    # the last step, half as much again for the checkpoint, 15 s
    assert 5 < left.total_seconds() < 2.5 * longest + 15, (left, longest)
    wait(lambda: told(job, "JobState") == "PENDING", job, printed, "requeue")
    first = steps_of(tmp_path / "limited")
    assert (
        0 < first < STEPS and "the time limit is near" in printed.read_text() and "exit code 85" in printed.read_text()
    )
    slow.unlink()
    start_now(job)
    wait(lambda: told(job, "JobState") == "COMPLETED", job, printed, "end of the job")
    assert told(job, "Restarts") == "1" and printed.read_text().count("resumed from") == 1
    assert_same(weights(tmp_path / "limited"), whole)


def kill_server(job: str) -> None:
    """Send SIGKILL to a job's server and all its processes, except its supervisor."""
    for pid in processes_of(job):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if any(word.endswith((b"vllm_main.py", b"spawn_main", b"vllm")) for word in words) and not any(
            b"supervisor.py" in w for w in words
        ):
            os.kill(pid, signal.SIGKILL)


def test_a_job_outlives_a_server_and_when_cancelled_leaves_nothing_and_stays_cancelled(tmp_path):
    job, printed = submit(tmp_path, "cancelled", "run.max_steps=10000"), tmp_path / "cancelled.out"
    wait(lambda: steps_of(tmp_path / "cancelled") >= 3, job, printed, "third step")
    kill_server(job)
    wait(lambda: " is back" in printed.read_text(), job, printed, "return of the server")
    log = tmp_path / "cancelled.jobs" / job / "attempt_0" / "servers.log"
    assert "was killed by SIGKILL; restarting it, 1 of 3 times (rollout.max_restarts)" in log.read_text()
    before = steps_of(tmp_path / "cancelled")
    wait(lambda: steps_of(tmp_path / "cancelled") >= before + 3, job, printed, "steps with it")
    family = processes_of(job)
    # the script, two launchers, two ranks, the server with its engine and worker, and their parents
    assert len(family) > 8
    before = world.shared_memory(family)
    command_output("scancel", job)
    wait(
        lambda: told(job, "JobState") == "CANCELLED" and not processes_of(job), job, printed, "end of all processes", 60
    )
    assert not any(
        path.exists() for path in before if "megagrpo" in path.name or path.name.startswith(("psm_", "vllm_"))
    )
    assert not (tmp_path / "cancelled.jobs" / job / "token").exists()
    time.sleep(1)
    assert told(job, "JobState") == "CANCELLED" and "requeueing the job" not in printed.read_text()


def test_a_node_that_is_not_as_it_must_be_ends_the_job_before_the_trainer(tmp_path):
    job = submit(tmp_path, "unfit", interface="nosuch0", env={})
    world.wait_for(lambda: told(job, "JobState") == "FAILED", "failure", 60)
    assert told(job, "ExitCode") == "2:0"
    printed = (tmp_path / "unfit.out").read_text()
    assert all(f"preflight: {node}: interface: nosuch0 does not exist on this node" in printed for node in ("n1", "n2"))
    assert "nothing was started" in printed and not (tmp_path / "unfit" / "resolved.yaml").exists()
