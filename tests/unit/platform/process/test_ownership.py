"""What a clean-up removes: only what is of this user and this package, and whose owner has ended, whatever its content
is."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megagrpo.platform.process.cleanup.ownership import (
    CPU_WORKERS,
    FOLDER,
    OWNER_LOCK,
    SEGMENTS,
    TEMPORARY,
    make_folder,
    owner_in,
    remove_left,
    remove_stale,
)
from megagrpo.platform.process.cleanup.removal import remove, remove_own_file, remove_tree
from megagrpo.platform.process.cleanup.scratch import temporary_files

HOLDS = """
import sys, time
from pathlib import Path
from megagrpo.platform.process.cleanup.ownership import make_folder
print(make_folder(sys.argv[1], Path(sys.argv[2]))[0], flush=True)
time.sleep(600)
"""
CLEANS = (
    "import sys; from pathlib import Path; from megagrpo.platform.process.cleanup.ownership import remove_stale; "
    "remove_stale(Path(sys.argv[1]))"
)
DEEP = "import os\nfor _ in range({levels}):\n    os.mkdir('a'); os.chdir('a')\nopen('file', 'w').close()"
OTHER = 65534  # another user
OWN_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")
needs_namespaces = pytest.mark.skipif(
    subprocess.run([*OWN_NAMESPACE, "true"], capture_output=True).returncode != 0,
    reason="this user cannot create a PID namespace",
)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory that every user can write to, as /dev/shm: a disk creates only a thousand folders a second."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    folder.chmod(0o1777)
    yield folder
    assert remove_tree(folder)


@contextmanager
def running(memory: Path, *before: str, code: str = HOLDS) -> Iterator[subprocess.Popen]:
    """A process that has a folder in `memory` and prints its path. It is killed at the end."""
    command = [*before, sys.executable, "-c", code, FOLDER, memory]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def left_by_an_ended_process(parent: Path, prefix: str = FOLDER) -> Path:
    """A folder whose process has ended. A closed lock is the same as an ended process."""
    folder, lock = make_folder(prefix, parent)
    os.close(lock)
    return folder


def as_another_user(program: str, folder: Path) -> None:
    """Run a Python program as a second user in `folder`, in a fork: that user may not be able to start this
    interpreter."""
    pid = os.fork()
    if not pid:
        try:
            os.chdir(folder)
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            exec(program, {})
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_files_of_an_ended_process_go_and_files_of_a_living_one_stay(memory):
    with running(memory) as holder:
        living = Path(holder.stdout.readline().strip())
        owners = [owner_in(living.name, FOLDER), owner_in(left_by_an_ended_process(memory).name, FOLDER)]
        for owner in owners:
            for label in (SEGMENTS, CPU_WORKERS):
                (memory / f"{label}{owner}-1a2b3c4d-tp:0-[0-1]").touch()
        remove_stale(memory)
        assert names(memory) == {
            living.name,
            *(f"{label}{owners[0]}-1a2b3c4d-tp:0-[0-1]" for label in (SEGMENTS, CPU_WORKERS)),
        }
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # a zombie, which init may never reap
        remove_stale(memory)
        assert names(memory) == set()


@needs_namespaces
def test_files_of_a_process_in_another_pid_namespace_stay_until_it_ends(memory):
    """Two containers with one /dev/shm do not see each other's processes."""
    with running(memory, *OWN_NAMESPACE) as container:
        folder = Path(container.stdout.readline().strip())
        assert folder.name.startswith(f"{FOLDER}1.")
        remove_stale(memory)
        subprocess.run([*OWN_NAMESPACE, sys.executable, "-c", CLEANS, memory], check=True)
        assert folder.exists()
        container.kill()
        container.stdout.read()  # until the process in it has ended too
        remove_stale(memory)
        assert not folder.exists()


@pytest.mark.parametrize(
    "name",
    [
        "models",
        "1234",
        "1234.",
        "1234.17-aa",
        "1234.abcdefgh-x",
        "1234.abcdefghi",
        "x.abcdefgh",
        "1234.ABCDEFGH",
        "1234.abcdefgh\n",
        "",
    ],
)
def test_a_folder_whose_name_parses_only_in_part_stays(name, memory):
    folder = memory / f"{FOLDER}{name}"
    folder.mkdir()
    (folder / OWNER_LOCK).write_text("1\n")
    (folder / "model.safetensors").touch()
    remove_stale(memory)
    assert (folder / "model.safetensors").exists()


def test_a_folder_without_a_lock_that_was_held_once_stays(memory):
    bare, fresh = memory / f"{FOLDER}1.abcdefgh", memory / f"{FOLDER}2.abcdefgh"
    bare.mkdir()
    fresh.mkdir()
    (fresh / OWNER_LOCK).touch()  # its process is about to lock it
    remove_stale(memory)
    assert names(memory) == {bare.name, fresh.name}


@needs_root
def test_files_of_another_user_stay_also_for_root(memory):
    program = f"import os\nos.mkdir('{FOLDER}1.abcdefgh')\nopen('{FOLDER}1.abcdefgh/{OWNER_LOCK}', 'w').write('1')\n"
    program += f"open('{SEGMENTS}1.abcdefgh-x', 'w')\nos.chmod('{FOLDER}1.abcdefgh', 0o500)"
    as_another_user(program, memory)
    left = owner_in(left_by_an_ended_process(memory).name, FOLDER)
    as_another_user(f"open('{SEGMENTS}{left}-x', 'w')", memory)  # under the name of this user's process
    (memory / f"{SEGMENTS}{left}-own").touch()
    remove_stale(memory)
    assert names(memory) == {f"{FOLDER}1.abcdefgh", f"{SEGMENTS}1.abcdefgh-x", f"{SEGMENTS}{left}-x"}
    assert stat.S_IMODE((memory / f"{FOLDER}1.abcdefgh").stat().st_mode) == 0o500
    assert not remove_own_file(memory / f"{SEGMENTS}1.abcdefgh-x")


def test_a_name_that_no_file_has_keeps_no_weights(memory):
    """Only regular files of this user wait for their removal: anybody may create the name."""
    left = left_by_an_ended_process(memory)
    owner = owner_in(left.name, FOLDER)
    (memory / f"{SEGMENTS}{owner}-folder").mkdir()
    os.mkfifo(memory / f"{CPU_WORKERS}{owner}-pipe")
    (memory / f"{SEGMENTS}{owner}-link").symlink_to("nowhere")
    remove_stale(memory)
    assert not left.exists() and len(names(memory)) == 3


@needs_root
@pytest.mark.parametrize("prefix", [FOLDER, TEMPORARY])
def test_a_deep_folder_of_another_user_stops_no_clean_up(prefix, memory):
    own = left_by_an_ended_process(memory, prefix)
    program = f"import os\nos.mkdir('{prefix}0.abcdefgh'); os.chdir('{prefix}0.abcdefgh'); open('{OWNER_LOCK}', 'w').write('1')\n"
    as_another_user(program + DEEP.format(levels=1500), memory)
    remove_left(memory, prefix)
    assert names(memory) == {f"{prefix}0.abcdefgh"} and not own.exists()


def test_a_deep_folder_of_an_ended_process_is_removed(memory):
    subprocess.run([sys.executable, "-c", DEEP.format(levels=1100)], cwd=left_by_an_ended_process(memory), check=True)
    remove_stale(memory)
    assert names(memory) == set()


def test_links_to_the_files_of_others_are_not_followed(memory, tmp_path):
    (tmp_path / OWNER_LOCK).write_text("1\n")
    (tmp_path / "file").touch()
    (memory / f"{FOLDER}1.abcdefgh").symlink_to(tmp_path)  # in place of the folder
    below = left_by_an_ended_process(memory)
    owner = owner_in(below.name, FOLDER)
    (below / "link").symlink_to(tmp_path)
    (memory / f"{SEGMENTS}{owner}-x").symlink_to(tmp_path / "file")  # in place of a segment
    replaced = left_by_an_ended_process(memory)
    (replaced / OWNER_LOCK).unlink()
    (replaced / OWNER_LOCK).symlink_to(tmp_path / OWNER_LOCK)  # in place of the lock
    os.mkfifo(memory / f"{FOLDER}2.abcdefgh")
    pipe = left_by_an_ended_process(memory)
    (pipe / OWNER_LOCK).unlink()
    os.mkfifo(pipe / OWNER_LOCK)
    remove_stale(memory)
    assert names(tmp_path) == {OWNER_LOCK, "file"} and (tmp_path / OWNER_LOCK).read_text() == "1\n"
    stay = {f"{FOLDER}1.abcdefgh", f"{FOLDER}2.abcdefgh", f"{SEGMENTS}{owner}-x", replaced.name, pipe.name}
    assert stay <= names(memory)


def test_a_clean_up_leaves_a_folder_with_the_name_of_a_file(memory):
    stuck, free = left_by_an_ended_process(memory), left_by_an_ended_process(memory)
    owner = owner_in(stuck.name, FOLDER)
    (memory / f"{SEGMENTS}{owner}-x").mkdir()  # no file of a process has this form
    remove_stale(memory)
    assert names(memory) == {f"{SEGMENTS}{owner}-x"} and not free.exists() and not stuck.exists()


def test_a_clean_up_beside_processes_that_come_and_go_raises_nothing(memory):
    code = HOLDS.replace(
        "time.sleep(600)", "while True: make_folder(sys.argv[1], Path(sys.argv[2]))[0].rename(sys.argv[2] + '/x')"
    )
    code = code.replace("print(", "import os; [os.mkdir(sys.argv[2] + '/x')]; print(")
    with running(memory, code=code) as process:
        process.stdout.readline()
        for _ in range(50):
            remove_stale(memory)


def test_a_lock_that_another_fork_still_holds_counts_as_alive(memory):
    code = HOLDS.replace(
        "time.sleep(600)", "import os; os.fork() and os._exit(0); print(os.getpid(), flush=True); time.sleep(600)"
    )
    with running(memory, code=code) as process:
        folder, fork = Path(process.stdout.readline().strip()), int(process.stdout.readline())
        process.wait()
        remove_stale(memory)
        assert folder.exists()
        os.kill(fork, signal.SIGKILL)
        process.stdout.read()  # until the fork has ended
        remove_stale(memory)
        assert not folder.exists()


@needs_root
def test_a_mount_point_inside_a_folder_keeps_its_content(memory, tmp_path):
    """A bind mount has the device number of its source, so only the kernel can tell it from a folder."""
    (tmp_path / "data").touch()
    code = "import ctypes, os, sys\nfrom megagrpo.platform.process.cleanup.removal import remove_tree\n"
    code += "libc = ctypes.CDLL(None, use_errno=True)\n"
    code += "for place in ('tree/mounted', 'tree/a/mounted'):\n"
    code += (
        f"    os.makedirs(place)\n    assert libc.mount({str(tmp_path)!r}.encode(), place.encode(), None, 4096, "
        f"None) == 0\n"
    )
    code += "assert not remove_tree('tree')\n"
    ended = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", code], cwd=memory, capture_output=True, text=True
    )
    if "Operation not permitted" in ended.stderr:
        pytest.skip("this user cannot create a mount namespace")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "data").exists()


def test_a_removal_takes_a_link_and_leaves_its_target(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    assert (
        remove(tmp_path / "link") and (tmp_path / "theirs" / "file").exists() and not (tmp_path / "link").is_symlink()
    )
    assert remove(tmp_path / "absent") and remove(tmp_path / "theirs") and not (tmp_path / "theirs").exists()


def test_a_file_that_was_replaced_meanwhile_stays(tmp_path):
    (tmp_path / "file").touch()
    inode = (tmp_path / "file").stat().st_ino
    (tmp_path / "new").touch()
    (tmp_path / "new").replace(tmp_path / "file")
    assert not remove_own_file(tmp_path / "file", inode) and (tmp_path / "file").exists()
    assert remove_own_file(tmp_path / "file", (tmp_path / "file").stat().st_ino) and not (tmp_path / "file").exists()


def test_a_users_temporary_directory_with_a_similar_name_stays(tmp_path, monkeypatch):
    mine = tmp_path / f"{TEMPORARY}mine"
    mine.mkdir()
    monkeypatch.setenv("TMPDIR", str(mine))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with temporary_files() as folder:
        assert folder.parent == mine
    assert mine.exists()
