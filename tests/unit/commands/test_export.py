"""What `megagrpo export` and `merge` refuse before anything is exported: options for the hub, and paths that are no
checkpoints."""

import pytest

from megagrpo.__main__ import main
from megagrpo.families.weight_sources import MEGATRON_LM, TORCH_DIST
from megagrpo.records.checkpoints.run_files import CHECKPOINTS, RESOLVED, STATE_FILE, why_no_checkpoint
from tests.unit.for_each import for_each


@pytest.mark.parametrize("command", ["export", "merge"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--push", "a/b/c"], "--push: 'a/b/c' is no name on the hub; write OWNER/NAME"),
        (["--private"], "--private: has no effect without --push; add --push OWNER/NAME"),
        (["--revision", "v1"], "--revision: has no effect without --push; add --push OWNER/NAME"),
    ],
)
def test_a_wrong_option_for_the_hub_exports_nothing(command, words, message, tmp_path, capfd):
    assert main([command, str(tmp_path / "none"), str(tmp_path / "out"), *words]) == 2
    assert message in capfd.readouterr().err and not (tmp_path / "out").exists()


@pytest.fixture
def run(tmp_path):
    """A run with one complete checkpoint and one that is being written."""
    for name in ("step_000002", ".step_000004.partial"):
        (tmp_path / "run" / CHECKPOINTS / name).mkdir(parents=True)
        (tmp_path / "run" / CHECKPOINTS / name / TORCH_DIST).touch()
    (tmp_path / "run" / CHECKPOINTS / "step_000002" / STATE_FILE).touch()
    (tmp_path / "run" / RESOLVED).touch()
    return tmp_path / "run"


NEWEST = "name a checkpoint, the newest is {run}/checkpoints/step_000002"


@for_each(
    ("path", "why"),
    [
        ("nowhere/step_000002", "does not exist"),
        ("checkpoints/step_000003", f"does not exist; {NEWEST}"),
        ("checkpoints/latest", f"does not exist; {NEWEST}"),
        ("checkpoints/best", f"does not exist; {NEWEST}"),
        (RESOLVED, "is a file; name the folder of a checkpoint"),
        (
            "checkpoints/.step_000004.partial",
            f"is incomplete: it is still being written, or its run was killed; {NEWEST}",
        ),
        ("", f"is the folder of a run; {NEWEST}"),
        ("checkpoints", f"is the folder of a run's checkpoints; {NEWEST}"),
        ("checkpoints/step_000002", None),
    ],
)
def test_a_path_that_is_no_checkpoint_says_what_it_is_and_what_to_name(path, why, run):
    assert why_no_checkpoint(run / path) == (why and why.format(run=run))


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([], "is not a checkpoint: it lacks metadata.json; name a folder such as runs/NAME/checkpoints/step_000010"),
        (["config.json", "model.safetensors"], "is a Hugging Face folder, which needs no export"),
        ([RESOLVED], "is the folder of a run, which has no complete checkpoint"),
        ([MEGATRON_LM], None),
        ([TORCH_DIST, ".metadata"], None),
    ],
)
def test_a_folder_of_another_kind_is_named(files, why, tmp_path):
    for name in files:
        (tmp_path / name).touch()
    assert why_no_checkpoint(tmp_path) == why


def test_a_folder_that_does_not_exist_is_not_exported(tmp_path, capfd):
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert (
        f"error: CHECKPOINT: {tmp_path}/none does not exist" in capfd.readouterr().err
        and not (tmp_path / "out").exists()
    )
