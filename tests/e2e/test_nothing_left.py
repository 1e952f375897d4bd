"""Runs by `launch/local.sh` with servers of their own leave no temporary files, however they end."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests.e2e import world


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("killed", [False, True], ids=["ends", "is killed"])
def test_a_run_leaves_nothing_among_temporary_files(killed, ranks, tmp_path):
    with tempfile.TemporaryDirectory() as around:
        run = world.start(
            tmp_path, "run.max_steps=20", "run.save_steps=5", launched=True, TMPDIR=around, NPROC=str(ranks)
        )
        world.wait_for(lambda: world.steps_done(tmp_path) >= 2, "second step")
        assert all(path.name.startswith("megagrpo_tmp_") for path in Path(around).iterdir())
        assert list(Path(around).rglob("vllm_dist_*")) and list(Path(around).rglob("megagrpo_worker_*"))
        if killed:
            words = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in world.family(run.pid)}
            os.kill(max(pid for pid in words if "megagrpo" in words[pid] and "train" in words[pid]), signal.SIGKILL)
        assert (world.finish(run, tmp_path).code == 0) != killed
        world.wait_for(lambda: not list(Path(around).iterdir()), "end of all temporary files", seconds=20)
