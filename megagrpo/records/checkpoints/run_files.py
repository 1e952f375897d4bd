"""Names of a run's files and folders; its checkpoints, and removal of old ones. Needs only the standard library."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from megagrpo.platform.process.cleanup.removal import remove

CHECKPOINTS = "checkpoints"  # folder of a run's checkpoints
STATE_FILE = "megagrpo.json"  # a checkpoint that has this file is complete
_CHECKPOINT = r"step_\d{6,}"
LATEST = "latest"  # stands for the newest complete checkpoint
BEST = "best"  # name of the link to the checkpoint with the best evaluation
PARTIAL = ".partial"  # end of the name of a folder that is incomplete
METRICS, COMPLETIONS = "metrics.jsonl", "completions.jsonl"
AXES = ("tp", "cp", "pp", "dp", "ep", "etp")  # of a recorded layout
RESOLVED = "resolved.yaml"  # the config of a run, with every value
FROM_PYTHON = "from_python"  # folder of the functions and data that megagrpo.train got as Python objects


def make_run_folder(folder: Path) -> None:
    """Create the folder of a run or of a job's logs without rights for other users, unless it exists. The umask decides
    on the group's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # a file of this name is an error when a file in it is opened
        folder.mkdir(mode=0o770)


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    complete = (p for p in folder.glob("step_*") if re.fullmatch(_CHECKPOINT, p.name) and (p / STATE_FILE).is_file())
    return sorted(complete, key=lambda p: int(p.name.removeprefix("step_")))


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the highest step, or None."""
    complete = checkpoints(folder)
    return complete[-1] if complete else None


def named_checkpoint(run: Path, name: str) -> Path:
    """Return the path that `name` stands for: `latest` or `best` of the run in this folder, or a path. Raises
    ValueError when the run has no such checkpoint."""
    folder = run / CHECKPOINTS
    best = (folder / BEST).resolve() if (folder / BEST).exists() else None
    fixes = {LATEST: "train it to its end, or set run.save_steps", BEST: "set evaluation.keep_best before training"}
    path = {LATEST: newest_checkpoint(folder), BEST: best}.get(name, Path(name))
    if path is None:
        raise ValueError(f"{run} has no {name} checkpoint; {fixes[name]}")
    return path


def partial_of(checkpoint: Path, what: str = "") -> Path:
    """Return the folder in which a checkpoint is written, or with `what` another one that `remove_partial` removes."""
    return checkpoint.with_name(f".{checkpoint.name}{what}{PARTIAL}")


def remove_partial(folder: Path) -> None:
    """Remove checkpoints in `folder` whose writing or removal was interrupted."""
    for path in folder.glob(".step_*.partial"):
        if re.fullmatch(rf"\.{_CHECKPOINT}(\.old)?\.partial", path.name):
            remove(path)


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that remains of an interrupted removal do not count as a checkpoint.
    Of a link only the link is removed."""
    remove(checkpoint.rename(partial_of(checkpoint, ".old")))


def make_room(checkpoint: Path) -> None:
    """Remove the checkpoint or link at this path. Anything else there is not a run's, and is renamed."""
    if checkpoint.is_symlink() or (checkpoint / STATE_FILE).is_file():
        remove_checkpoint(checkpoint)
    elif os.path.lexists(checkpoint):
        checkpoint.rename(next_free(checkpoint))


def remove_old(folder: Path, keep: int, best: Path) -> None:
    """Remove all checkpoints but the newest `keep` and `best`. Links stay: no run links under a checkpoint's name."""
    for old in checkpoints(folder)[:-keep]:
        if old != best and not old.is_symlink():
            remove_checkpoint(old)


def point_to(checkpoint: Path, link: Path) -> None:
    """Replace a link atomically, so it never points to nothing. A folder of its name is not a run's, and is renamed."""
    if link.is_dir() and not link.is_symlink():
        link.rename(next_free(link))
    fresh = link.with_name(f".{link.name}{PARTIAL}")
    remove(fresh)
    fresh.symlink_to(checkpoint.name)
    fresh.replace(link)


def next_free(path: Path) -> Path:
    """Return the first of PATH.1, PATH.2, ... at which there is nothing, not even a broken link."""
    return next(p for p in (path.with_name(f"{path.name}.{i}") for i in range(1, 10_000)) if not os.path.lexists(p))


def why_no_checkpoint(path: Path) -> str | None:
    """Return why `path` is not a distributed checkpoint, and what to name instead: the end of a sentence that begins
    with the path. Return None for a checkpoint, of this or another program."""
    from megagrpo.families.weight_sources import MEGATRON_LM, NEMO_WEIGHTS, TORCH_DIST

    try:
        if not path.exists():
            return f"does not exist{_others_in(path.parent)}"
        if not path.is_dir():
            return "is a file; name the folder of a checkpoint"
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if path.name.endswith(PARTIAL):
        return f"is incomplete: it is still being written, or its run was killed{_others_in(path.parent)}"
    if TORCH_DIST in names or MEGATRON_LM in names or (path / NEMO_WEIGHTS).is_file():
        return None
    if RESOLVED in names or CHECKPOINTS in names:
        return f"is the folder of a run{_others_in(path / CHECKPOINTS) or ', which has no complete checkpoint'}"
    if others := _others_in(path):
        return f"is the folder of a run's checkpoints{others}"
    if "config.json" in names:
        return "is a Hugging Face folder, which needs no export"
    return f"is not a checkpoint: it lacks {TORCH_DIST}; name a folder such as runs/NAME/{CHECKPOINTS}/step_000010"


def _others_in(folder: Path) -> str:
    """Return the end of a message that names the newest complete checkpoint in `folder`; empty without one."""
    newest = newest_checkpoint(folder)
    return f"; name a checkpoint, the newest is {newest}" if newest else ""
