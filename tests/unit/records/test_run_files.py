"""The checkpoints of a run: their order, and which of them a new one removes."""

from pathlib import Path

import pytest

from megagrpo.records.checkpoints.run_files import (
    STATE_FILE,
    checkpoints,
    make_room,
    newest_checkpoint,
    next_free,
    partial_of,
    point_to,
    remove_old,
    remove_partial,
)


def checkpoint(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / STATE_FILE).write_text("{}")
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_checkpoints_are_in_the_order_of_their_steps_beyond_six_digits(tmp_path):
    made = [checkpoint(tmp_path / f"step_{step:06d}") for step in (9, 10, 999_999, 1_000_000)]
    assert checkpoints(tmp_path) == made and newest_checkpoint(tmp_path) == made[-1]
    remove_old(tmp_path, 1, made[0])
    assert checkpoints(tmp_path) == [made[0], made[-1]]


def test_only_checkpoints_of_the_run_are_removed(tmp_path):
    """A copy with another name, a link to somebody's checkpoint and a folder without a state file stay."""
    folder, theirs = tmp_path / "checkpoints", checkpoint(tmp_path / "theirs")
    for name in ("step_000001", "step_000001_backup", "step_000004", "step_000005"):
        checkpoint(folder / name)
    (folder / "step_000002").symlink_to(theirs)
    (folder / "step_000003").mkdir()
    remove_old(folder, 1, folder / "step_000004")
    assert names(folder) == ["step_000001_backup", "step_000002", "step_000003", "step_000004", "step_000005"]
    assert (theirs / STATE_FILE).exists()


@pytest.mark.parametrize(
    "what", ["a checkpoint", "a link", "a broken link", "a folder without a state file", "nothing"]
)
def test_a_new_checkpoint_takes_the_place_of_an_old_one_and_of_nothing_else(what, tmp_path):
    theirs, final = checkpoint(tmp_path / "theirs"), tmp_path / "checkpoints" / "step_000001"
    final.parent.mkdir()
    if what == "a checkpoint":
        checkpoint(final)
    elif what == "a folder without a state file":
        final.mkdir()
        (final / "notes").touch()
    elif what != "nothing":
        final.symlink_to(theirs if what == "a link" else tmp_path / "absent")
    make_room(final)
    assert names(final.parent) == (["step_000001.1"] if what == "a folder without a state file" else [])
    assert (theirs / STATE_FILE).exists()


def test_remains_of_an_interrupted_save_are_removed_and_folders_with_similar_names_stay(tmp_path):
    stay = [".step_backup.partial", ".step_000001.copy.partial", ".step_01.partial"]
    for name in stay:
        (tmp_path / name).mkdir()
    theirs = checkpoint(tmp_path / "theirs")
    checkpoint(partial_of(tmp_path / "step_000001"))
    checkpoint(partial_of(tmp_path / "step_000002", ".old"))
    partial_of(tmp_path / "step_000003").symlink_to(theirs)
    remove_partial(tmp_path)
    assert names(tmp_path) == sorted([*stay, "theirs"]) and (theirs / STATE_FILE).exists()


def test_the_link_to_the_best_checkpoint_takes_the_place_of_a_link_and_of_nothing_else(tmp_path):
    steps = [checkpoint(tmp_path / f"step_00000{i}") for i in (1, 2)]
    best = tmp_path / "best"
    best.mkdir()
    (best / "notes").touch()
    for step in steps:
        point_to(step, best)
        assert best.is_symlink() and best.resolve() == step
    assert (tmp_path / "best.1" / "notes").exists() and names(tmp_path) == "best best.1 step_000001 step_000002".split()


def test_a_broken_link_counts_as_taken(tmp_path):
    (tmp_path / "run.1").symlink_to(tmp_path / "absent")
    assert next_free(tmp_path / "run") == tmp_path / "run.2"
