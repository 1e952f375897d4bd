"""Temporary files of a process: their location, and their removal however the process ends."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megagrpo.platform.process.cleanup.removal import remove_tree
from megagrpo.platform.process.cleanup.scratch import temporary_files

LIVES = "import time\nfrom megagrpo.platform.process.cleanup.scratch import temporary_files\nwith temporary_files() as folder:\n"
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
        told = subprocess.run(
            [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"], capture_output=True, text=True
        )
        assert folder.parent == around and made.parent == folder and told.stdout.strip() == str(folder)
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


DEEP = "import os\nfor _ in range({levels}):\n    os.mkdir('a')\n    open('b', 'w').close()\n    os.chdir('a')\n"
NO_RIGHTS = "import os\nfor name in ('a', 'a/b', 'a/b/c'):\n    os.mkdir(name)\nopen('a/b/file', 'w').close()\n"
NO_RIGHTS += "for name in ('a/b/c', 'a/b', 'a'):\n    os.chmod(name, 0)\nos.chmod('.', 0o500)\n"


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory: a disk creates only a thousand folders a second."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def fill(folder: Path, program: str) -> None:
    folder.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)


def as_another_user(action) -> int:
    """Exit code of a fork that runs `action` without root's rights; without root, as the same user."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            code = 0 if action() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    "program", [DEEP.format(levels=2100), NO_RIGHTS], ids=["2,100 nested folders", "folders without permissions"]
)
def test_every_tree_that_a_program_makes_is_removed(memory, program):
    fill(memory / "tree", program)
    if os.getuid() == 0:
        subprocess.run(["chown", "-R", "65534", memory], check=True)
    assert as_another_user(lambda: remove_tree(memory / "tree")) == 0
    assert not list(memory.iterdir())


def test_links_are_removed_and_not_followed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "mine")
    assert remove_tree(tmp_path / "tree") and not (tmp_path / "tree").exists()
    (tmp_path / "tree").symlink_to(tmp_path / "mine")
    assert not remove_tree(tmp_path / "tree")
    assert (tmp_path / "mine" / "file").exists() and remove_tree(tmp_path / "absent")


def test_a_tree_that_a_process_still_writes_to_raises_nothing(tmp_path):
    (tmp_path / "tree").mkdir()
    writes = (
        "import os\nwhile True:\n    os.makedirs('a/b', exist_ok=True)\n    open('a/b/c', 'w').close()\n    "
        "print(flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", writes], cwd=tmp_path / "tree", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as writer:
        writer.stdout.readline()
        remove_tree(tmp_path / "tree")
        writer.kill()
    assert remove_tree(tmp_path / "tree")


def test_deep_folders_in_temporary_files_harm_neither_their_process_nor_the_next_one(memory, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(memory))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with temporary_files() as folder:
        fill(folder / "tree", DEEP.format(levels=1100))
    assert not list(memory.iterdir())
    left = subprocess.run(
        [sys.executable, "-c", LIVES.replace("time.sleep(60)", "import os; os._exit(0)")],
        capture_output=True,
        text=True,
    )
    fill(Path(left.stdout.strip()) / "tree", DEEP.format(levels=1100))
    with temporary_files():
        pass
    assert not list(memory.iterdir())
