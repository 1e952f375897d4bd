"""Creates the folder of a new task: data, a reward function, a config and a README.

    megagrpo init my_task
    megagrpo check my_task/run.yaml
    megagrpo train my_task/run.yaml

Unchanged, the task trains in minutes without a GPU. Replace the data, the reward and the model step by step.

    megagrpo init my_task --task

creates a task for a run of several: `tasks: [my_task/my_task.yaml]`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pydantic import ValidationError

from megagrpo.config import ConfigError, RunSection
from megagrpo.config.json_schema import schema_text
from megagrpo.platform.process.terminal import show

TEMPLATES = Path(__file__).with_name("new_task")  # `reward.txt` is the text of reward.py


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo init`."""
    parser.add_argument(
        "folder", type=Path, metavar="NAME", help="folder to create; its last part is the name of the run"
    )
    parser.add_argument(
        "--task", action="store_true", help="create one task for the list `tasks` of a run, in place of a whole run"
    )


def run(options: argparse.Namespace) -> int:
    """Create the folder. Raises ConfigError if it exists and is not empty, or if its name is no valid run name."""
    folder: Path = options.folder
    name = folder.resolve().name
    try:
        RunSection(name=name)
    except ValidationError:
        raise ConfigError(
            f"megagrpo init: {name!r} cannot be the name of a run; use letters, digits, `_`, `-` and `.`"
        ) from None
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"megagrpo init: {folder} exists and is not empty; choose another name, or remove the folder")

    def filled(file: str) -> str:
        text = (TEMPLATES / file).read_text(encoding="utf-8")
        return text.replace("@name@", name).replace("@folder@", str(folder))

    files = {
        "reward.py": filled("reward.txt"),
        "train.jsonl": addition_rows(range(57)),
        "heldout.jsonl": addition_rows(range(57, 69)),
    }
    if options.task:
        files = {f"{name}.yaml": filled("task.yaml"), **files}
        then = f"in the config of a run:\n  tasks: [{folder}/{name}.yaml]"
    else:
        files = {"run.yaml": filled("run.yaml"), **files, "README.md": filled("README.md")}
        files["schema.json"] = schema_text()
        then = f"next:\n  megagrpo check {folder}/run.yaml\n  megagrpo train {folder}/run.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"megagrpo init: {folder} cannot be written: {error.strerror}; choose another name"
        ) from error
    show(f"created {folder}: {', '.join(files)}\n\n{then}")
    return 0


def addition_rows(indices: range) -> str:
    """Return one JSON line per index, from 0 to 80, of the 81 additions of numbers from 1 to 9, in mixed order."""
    pairs = [(1 + index * 7 % 81 // 9, 1 + index * 7 % 81 % 9) for index in indices]
    return "".join(json.dumps({"prompt": f"What is {a} + {b}?", "answer": str(a + b)}) + "\n" for a, b in pairs)
