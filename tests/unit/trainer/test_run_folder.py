"""The folder of a run: a fresh start moves an earlier run aside and deletes nothing."""

from pathlib import Path

import pytest

from megagrpo.config import load_config
from megagrpo.records.checkpoints.run_files import FROM_PYTHON, METRICS
from megagrpo.records.checkpoints.run_lock import RunLock
from megagrpo.trainer.saving.run_folder import prepare_run_folder

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def begin(folder: Path) -> None:
    """Start a run that overwrites `folder`."""
    lock = RunLock(folder)
    overrides = [f"run.output_dir={folder.parent}", f"run.name={folder.name}", "run.overwrite=true"]
    assert prepare_run_folder(load_config(QUICKSTART, overrides), lock) is None
    lock.release()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_earlier_run_is_moved_to_a_name_at_which_nothing_is(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / METRICS).write_text("{}\n")
    (run / FROM_PYTHON).mkdir()
    (tmp_path / "run.1").symlink_to(tmp_path / "absent")
    begin(run)
    assert names(tmp_path) == {"run", "run.1", "run.2"} and (tmp_path / "run.1").is_symlink()
    assert names(tmp_path / "run.2") == {METRICS} and names(run) == {"resolved.yaml", FROM_PYTHON}


def test_a_link_to_the_folder_of_an_earlier_run_is_moved_and_the_folder_stays(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / METRICS).write_text("{}\n")
    (tmp_path / "run").symlink_to(tmp_path / "theirs")
    begin(tmp_path / "run")
    assert (
        (tmp_path / "run.1").is_symlink()
        and names(tmp_path / "theirs") == {METRICS}
        and names(tmp_path / "run") == {"resolved.yaml"}
    )


def test_a_folder_that_holds_no_run_keeps_its_files(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes").touch()
    begin(tmp_path / "run")
    assert names(tmp_path) == {"run"} and names(tmp_path / "run") == {"notes", "resolved.yaml"}


def test_a_folder_that_cannot_be_moved_is_an_error_that_names_the_key(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / METRICS).write_text("{}\n")

    def busy(*_):
        raise OSError(16, "Device or resource busy")  # a mount point

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(
        ValueError, match=r"run\.overwrite: .*/run cannot be moved to .*/run\.1: Device .* busy; set another run\.name"
    ):
        begin(tmp_path / "run")
    assert (tmp_path / "run" / METRICS).exists()
