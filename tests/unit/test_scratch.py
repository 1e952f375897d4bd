"""Temporary files of a process: where they are, and that they go with it however it ends."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megagrpo.scratch import temporary_files

LIVES = "import time\nfrom megagrpo.scratch import temporary_files\nwith temporary_files() as folder:\n"
LIVES += "    print(folder, flush=True)\n    time.sleep(60)"


@pytest.fixture
def around(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_temporary_files_are_in_a_folder_that_is_gone_afterwards(around):
    before = dict(os.environ)
    with temporary_files() as folder:
        made = Path(tempfile.mkdtemp())
        told = subprocess.run([sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"], capture_output=True, text=True)
        assert folder.parent == around and made.parent == folder and told.stdout.strip() == str(folder)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == before.get("TORCHINDUCTOR_CACHE_DIR", f"{around}/torchinductor_{os.getuid()}")
    assert not list(around.iterdir()) and tempfile.gettempdir() == str(around) and dict(os.environ) == before


def test_a_process_below_has_its_folder_beside_that_of_the_one_above(around):
    with temporary_files() as above:
        with temporary_files() as below:
            assert below.parent == above.parent == around and tempfile.gettempdir() == str(below)
        assert not below.exists() and tempfile.gettempdir() == str(above)
    assert not list(around.iterdir())


def test_a_fork_that_leaves_takes_nothing_away(around):
    with temporary_files() as folder:
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            assert folder.exists()
    if not pid:
        os._exit(0)


def test_what_a_killed_process_has_left_the_next_one_removes_and_what_a_living_one_has_stays(around):
    lives, dies = (subprocess.Popen([sys.executable, "-c", LIVES], stdout=subprocess.PIPE, text=True) for _ in range(2))
    try:
        kept, left = (Path(process.stdout.readline().strip()) for process in (lives, dies))
        (left / "file").touch()
        dies.send_signal(signal.SIGKILL)
        dies.wait()
        assert left.exists()
        with temporary_files():
            assert kept.exists() and not left.exists()
    finally:
        lives.kill()
        lives.wait()
