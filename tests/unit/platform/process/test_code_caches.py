"""Caches of compiled code lie where no other user can write."""

import os
import stat
from pathlib import Path

import pytest

from megagrpo.platform.process.cleanup.scratch import (
    CACHE_VARIABLES,
    INDUCTOR_CACHE,
    code_caches,
    not_private,
    temporary_files,
    user_cache,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
OTHER = 65534


@pytest.fixture
def home(monkeypatch, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    for name in ("XDG_CACHE_HOME", "RANK", *CACHE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_the_compile_cache_is_a_private_folder_of_the_user_and_stays(home):
    before = dict(os.environ)
    with temporary_files() as temporary:
        folder = Path(os.environ[INDUCTOR_CACHE])
        assert folder == home / ".cache" / "megagrpo" / "torchinductor" and temporary not in folder.parents
        assert [name for name in CACHE_VARIABLES if name in os.environ] == [INDUCTOR_CACHE]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE((home / ".cache").stat().st_mode) == 0o700
    assert dict(os.environ) == before


def test_a_folder_that_the_user_names_is_taken_as_it_is(home, monkeypatch, tmp_path):
    monkeypatch.setenv(INDUCTOR_CACHE, str(tmp_path / "named"))
    with temporary_files():
        assert os.environ[INDUCTOR_CACHE] == str(tmp_path / "named")
    assert not (home / ".cache").exists()


def test_the_cache_follows_xdg_cache_home_if_it_is_absolute(home, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache() == home / ".cache"


def assert_refused(temporary: Path, capfd, *words: str) -> None:
    """All caches are in the temporary folder, and one warning has the words."""
    assert code_caches(temporary).keys() == set(CACHE_VARIABLES)
    assert all(Path(folder).parent == temporary for folder in code_caches(temporary).values())
    said = capfd.readouterr().err.splitlines()[0]
    assert said.startswith("warning: ") and all(
        word in said for word in (*words, f"set {INDUCTOR_CACHE} to a folder that only you can write to")
    )


@pytest.mark.parametrize("mode", [0o777, 0o702])
@pytest.mark.parametrize("below", ["", ".cache", ".cache/megagrpo", ".cache/megagrpo/torchinductor"])
def test_a_cache_that_others_can_write_to_is_refused(below, mode, home, tmp_path, capfd):
    (home / below).mkdir(parents=True, exist_ok=True)
    (home / below).chmod(mode)
    assert_refused(tmp_path, capfd, f"other users can write to {home / below}".rstrip("/"))


@needs_root
@pytest.mark.parametrize("below", [".cache", ".cache/megagrpo/torchinductor"])
def test_a_cache_of_another_user_is_refused(below, home, tmp_path, capfd):
    (home / below).mkdir(parents=True)
    os.chown(home / below, OTHER, OTHER)
    assert_refused(tmp_path, capfd, f"{home / below} belongs to another user")


@needs_root
def test_a_home_folder_in_a_sticky_folder_is_refused_when_another_user_was_first(home, monkeypatch, tmp_path, capfd):
    """HOME=/tmp in a container: there another user may have created .cache before."""
    home.chmod(0o1777)
    assert_refused(tmp_path, capfd, f"other users can write to {home}")
    (home / ".cache" / "megagrpo").rename(home / "moved")
    os.chown(home / ".cache", OTHER, OTHER)
    assert_refused(tmp_path, capfd, f"{home / '.cache'} belongs to another user")


@needs_root
def test_links_count_like_folders(home, tmp_path, capfd):
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    own.mkdir()
    theirs.mkdir()
    (home / ".cache").symlink_to(own)
    assert code_caches(tmp_path)[INDUCTOR_CACHE] == str(home / ".cache/megagrpo/torchinductor")
    assert (own / "megagrpo/torchinductor").is_dir()
    os.lchown(home / ".cache", OTHER, OTHER)
    assert not_private(home / ".cache" / "megagrpo") == f"{home / '.cache'} belongs to another user"
    (home / ".cache").unlink()
    (home / ".cache").symlink_to(os.path.relpath(theirs, home))
    theirs.chmod(0o777)
    assert_refused(tmp_path, capfd, f"other users can write to {theirs}")
    (home / ".cache").unlink()
    (home / ".cache").symlink_to(".cache")
    assert "too many links" in not_private(home / ".cache" / "megagrpo")


def test_a_private_group_of_the_user_is_allowed_and_a_shared_group_is_not(home):
    home.chmod(0o770)
    assert (not_private(home) == "") == (home.stat().st_gid == os.geteuid())
    if os.geteuid() == 0:
        os.chown(home, 0, OTHER)
        assert not_private(home) == f"other users can write to {home}"


def test_without_a_home_folder_a_run_compiles_into_its_temporary_folder(home, tmp_path, capfd):
    (home / ".cache").touch()
    assert code_caches(tmp_path)[INDUCTOR_CACHE] == str(tmp_path / "torchinductor") and capfd.readouterr().err == ""


def test_only_the_first_rank_warns(home, monkeypatch, tmp_path, capfd):
    home.chmod(0o777)
    monkeypatch.setenv("RANK", "1")
    assert code_caches(tmp_path).keys() == set(CACHE_VARIABLES) and capfd.readouterr().err == ""
