"""Names of the files and folders of a run, and the list of its checkpoints. Imports the standard library only."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

CHECKPOINTS = "checkpoints"  # folder of a run's checkpoints
STATE_FILE = "megagrpo.json"  # a checkpoint that has this file is complete
BEST = "best"  # name of the link to the checkpoint with the best evaluation
METRICS, COMPLETIONS = "metrics.jsonl", "completions.jsonl"
RESOLVED = "resolved.yaml"  # the config of a run, with every value
FROM_PYTHON = "from_python"  # folder of the functions and data that megagrpo.train got as Python objects


def make_run_folder(folder: Path) -> None:
    """Create the folder of a run or of a job's logs without rights for other users, unless it exists. The umask decides on the group's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # a file of this name is an error of whoever opens something in it
        folder.mkdir(mode=0o770)


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    complete = (p for p in folder.glob("step_*") if re.fullmatch(r"step_\d{6,}", p.name) and (p / STATE_FILE).is_file())
    return sorted(complete, key=lambda p: int(p.name.removeprefix("step_")))


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the highest step, or None."""
    complete = checkpoints(folder)
    return complete[-1] if complete else None
