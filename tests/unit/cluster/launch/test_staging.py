"""The copy of the environment on a node's disk: unpacked once, removed with what killed jobs left, refused if it cannot
work."""

import os
import shutil
import subprocess
import sys
import tarfile
from multiprocessing import get_context
from pathlib import Path

import pytest

from megagrpo.cluster.launch import staging
from megagrpo.cluster.launch.job import load_cluster
from megagrpo.config import ConfigError


@pytest.fixture
def environment(tmp_path):
    """A folder like a virtual environment: bin/python, and a package that only it has."""
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    site.mkdir(parents=True)
    (site / "only_here.py").write_text("PLACE = __file__\n")
    return folder


@pytest.fixture
def archive(environment, tmp_path):
    with tarfile.open(tmp_path / "env.tar", "w") as tar:
        tar.add(environment, ".")
    return tmp_path / "env.tar"


@pytest.fixture
def disk(tmp_path):
    """A folder as on a node's disk, with room."""
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def place_of(python: Path) -> str:
    told = subprocess.run([python, "-c", "import only_here; print(only_here.PLACE)"], capture_output=True, text=True)
    return told.stdout


def test_python_runs_from_the_copy(archive, disk):
    into = disk / "megagrpo_env.17"
    assert staging.main(["--archive", str(archive), "--into", str(into)]) == 0
    assert place_of(into / "bin" / "python").startswith(str(into)) and into.stat().st_mode & 0o077 == 0
    assert staging.main(["--remove", str(into)]) == 0
    assert list(disk.iterdir()) == []


@pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="needs squashfs-tools")
def test_python_runs_from_the_copy_of_a_squash_image(environment, disk, tmp_path):
    image, into = tmp_path / "env.sqsh", disk / "megagrpo_env.17"
    subprocess.run(["mksquashfs", environment, image, "-quiet", "-no-progress"], check=True)
    assert staging.main(["--archive", str(image), "--into", str(into)]) == 0
    assert place_of(into / "bin" / "python").startswith(str(into))


def test_nodes_that_share_a_disk_unpack_once(archive, disk):
    into, context = disk / "megagrpo_env.17", get_context("fork")
    nodes = [context.Process(target=staging.stage, args=(archive, into, ["17"])) for _ in range(4)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join(30)
    assert [node.exitcode for node in nodes] == [0] * 4
    assert sorted(path.name for path in disk.iterdir()) == ["megagrpo_env.17", "megagrpo_env.17.lock"]
    inode = (into / "bin").stat().st_ino
    staging.stage(archive, into, ["17"])
    assert (into / "bin").stat().st_ino == inode


def test_copies_of_jobs_that_have_ended_are_removed(archive, disk):
    for name in ("megagrpo_env.3", "megagrpo_env.4.part", "megagrpo_env.9", "mine"):
        (disk / name).mkdir()
    (disk / "megagrpo_env.5.lock").touch()
    assert staging.main(["--archive", str(archive), "--into", str(disk / "megagrpo_env.17"), "--running", "9 17"]) == 0
    left = sorted(path.name for path in disk.iterdir())
    assert left == ["megagrpo_env.17", "megagrpo_env.17.lock", "megagrpo_env.9", "mine"]


def test_a_disk_without_room_is_refused_before_anything_is_written(archive, disk, monkeypatch):
    monkeypatch.setattr(staging, "SPARE_BYTES", 2**60)
    with pytest.raises(ValueError, match=r"^staging.folder: .* GiB free, .* needs .*; name another folder, or leave"):
        staging.stage(archive, disk / "megagrpo_env.17", ["17"])
    assert [path.name for path in disk.iterdir()] == ["megagrpo_env.17.lock"]


def test_an_archive_without_python_or_a_damaged_one_is_refused(archive, disk, capsys):
    other = archive.with_name("other.tar")
    with tarfile.open(other, "w") as tar:
        tar.add(archive.parent / "env", "env")  # one folder too deep
    into = ["--into", str(disk / "megagrpo_env.17")]
    assert staging.main(["--archive", str(other), *into]) == 1
    assert "staging.archive: " in (said := capsys.readouterr().err) and "must hold an environment with bin/pyt" in said
    other.write_bytes(b"no archive" * 100)
    assert staging.main(["--archive", str(other), *into]) == 1
    assert "cannot be unpacked" in capsys.readouterr().err
    assert [path.name for path in disk.iterdir()] == ["megagrpo_env.17.lock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of another user")
def test_a_folder_of_another_user_is_never_run(archive, disk, capsys):
    into = disk / "megagrpo_env.17"
    into.mkdir()
    os.chown(into, 12345, 12345)
    assert staging.main(["--archive", str(archive), "--into", str(into)]) == 1
    assert "belongs to another user" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("staging: {archive: env.zip}", "staging.archive: must end in .tar, .sqsh, .squashfs"),
        ("staging: {archive: env.tar, folder: scratch}", "staging.folder: must be an absolute path"),
        ("staging: {archive: env.tar}\ncontainer: {image: i}", "staging: a container's environment comes with its im"),
    ],
)
def test_staging_that_cannot_work_is_refused_at_submission(lines, said, tmp_path):
    (tmp_path / "cluster.yaml").write_text(lines)
    with pytest.raises(ConfigError) as refused:
        load_cluster(tmp_path / "cluster.yaml")
    assert said in str(refused.value)
