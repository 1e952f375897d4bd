"""Checkpoints that cannot be written, and the number of checkpoints kept."""

import contextlib
import os
import resource
import signal
import subprocess

import pytest

from tests.e2e import world

# The largest file the trainer may write, in bytes: its weights in shared memory fit (1.5 MB), a checkpoint (4.6 MB)
# does not.
LIMIT = 3_000_000


def limit_files(pid=0, limit=LIMIT):
    """Limit the size of files that this process can write: larger writes fail half-way, as on a full disk."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.full
def test_the_newest_checkpoints_are_kept(tmp_path):
    run = world.train(tmp_path, "run.max_steps=4", "run.save_steps=1", "run.save_total_limit=2")
    assert run.code == 0 and run.saved == ["step_000003", "step_000004"]
    assert [line["checkpoint/failures"] for line in run.metrics] == [0, 0, 0, 0]


@pytest.mark.full
@pytest.mark.parametrize("background", ["true", "false"])
def test_a_full_disk_is_reported_and_counted_and_training_goes_on(background, tmp_path):
    often = ["run.max_steps=1000", "run.save_steps=1", "run.save_total_limit=1", f"run.async_save={background}"]
    with world.running(tmp_path, *often) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 2, "second step")
        limit_files(trainer.pid)
        world.wait_for(lambda: trainer.out().count("warning: writing checkpoint") >= 2, "second failure")
        kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
        limit_files(trainer.pid, resource.RLIM_INFINITY)
        failed = trainer.out().count("warning: writing checkpoint")
        world.wait_for(lambda: world.steps_done(tmp_path) >= len(steps(trainer)) + failed + 1, "another step")
        os.kill(trainer.pid, signal.SIGTERM)
        run = trainer.wait()
    assert run.code == 143, run.err
    # the newest one from before the disk was full stays until a newer one is complete
    assert len(kept) == 1 and kept[0] >= "step_000001"
    assert run.saved == [f"step_{len(run.metrics):06d}"]
    failures = [line["checkpoint/failures"] for line in run.metrics]
    assert failures[0] == 0 and failures[-1] == run.out.count("warning: writing checkpoint") >= 2
    assert "rank 0 could not write its part" in run.out
    assert world.train(tmp_path, f"run.max_steps={len(run.metrics) + 1}", "--resume").code == 0


def steps(trainer):
    """Checkpoints that a run has reported."""
    return [line for line in trainer.out().splitlines() if line.startswith("checkpoint ")]


def test_a_run_whose_last_checkpoint_fails_has_failed(tmp_path):
    run = world.train(tmp_path, "run.save_steps=1", prepare=limit_files)
    assert run.code == 1 and len(run.metrics) == 2 and run.saved == []
    assert "warning: writing checkpoint" in run.out and [line["checkpoint/failures"] for line in run.metrics] == [0, 1]
    message = run.err.strip().splitlines()[-1]
    assert (
        message.startswith("rank 0 stops: writing checkpoint")
        and "step_000002 failed" in message
        and "GiB of disk space free" in message
    )
    assert "Traceback" not in run.err


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield tmp_path
    with contextlib.suppress(subprocess.CalledProcessError):
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_disk_without_room_for_a_checkpoint_is_named_before_anything_is_written(small_disk):
    run = world.train(small_disk)
    assert run.code == 1 and run.saved == [] and len(run.metrics) == 2
    assert "the disk is full: " in run.err
