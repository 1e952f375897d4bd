"""The lock on a run folder: its holder, its release, and a folder that disappears."""

import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from megagrpo.records.checkpoints.run_lock import LOCK, RunFolderLost, RunLock

HOLDER = """
import sys, time
from pathlib import Path
from megagrpo.records.checkpoints.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.take()
print("holds", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `tmp_path`/run."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_a_locked_folder_is_refused_in_one_line_with_host_and_process_of_the_holder(holder, tmp_path):
    with pytest.raises(ValueError) as refused:
        RunLock(tmp_path / "run").take()
    assert f"run.name: {tmp_path}/run is in use by process {holder.pid} on host {socket.gethostname()};" in str(
        refused.value
    )
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_is_free_when_its_holder_is_killed(number, holder, tmp_path):
    holder.send_signal(number)
    holder.wait()
    lock = RunLock(tmp_path / "run")
    lock.take()
    lock.take()  # this process holds it already
    assert (tmp_path / "run" / LOCK).read_text() == f"process {os.getpid()} on host {socket.gethostname()}\n"
    lock.check()


def test_a_release_removes_the_lock_file_and_an_empty_folder(tmp_path):
    lock = RunLock(tmp_path / "run")
    lock.take()
    lock.release()
    assert not (tmp_path / "run").exists()
    lock.take()
    (tmp_path / "run" / "metrics.jsonl").touch()
    lock.release()
    lock.release()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_release_leaves_a_folder_that_the_user_has_made(tmp_path):
    (tmp_path / "run").mkdir()
    lock = RunLock(tmp_path / "run")
    lock.take()
    lock.release()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_link_in_place_of_the_lock_is_refused_and_its_target_stays(tmp_path):
    (tmp_path / "theirs").write_text("text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "theirs")
    with pytest.raises(
        ValueError, match=r"run\.output_dir: .* cannot be created or written to: Too many levels of symbolic links"
    ):
        RunLock(tmp_path / "run").take()
    assert (tmp_path / "theirs").read_text() == "text"


@pytest.mark.parametrize(
    "lose",
    [
        lambda folder: shutil.rmtree(folder),
        lambda folder: folder.rename(folder.with_name("elsewhere")),
        lambda folder: (shutil.rmtree(folder), folder.mkdir()),
        lambda folder: (shutil.rmtree(folder), folder.mkdir(), (folder / LOCK).touch()),
        lambda folder: (folder / LOCK).unlink(),
    ],
    ids=["deleted", "moved", "made again", "made again with a lock", "lock removed"],
)
def test_a_folder_that_is_no_longer_the_one_of_the_run_is_an_error_that_names_it(lose, tmp_path):
    lock = RunLock(tmp_path / "run")
    lock.take()
    lock.check()
    lose(tmp_path / "run")
    with pytest.raises(RunFolderLost, match=f"{tmp_path}/run was deleted, moved or taken over by another run"):
        lock.check()
    lock.release()
