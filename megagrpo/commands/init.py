"""Creates the folder of a new task: data, a reward function, a config and a README.

    megagrpo init my_task
    megagrpo check my_task/run.yaml
    megagrpo train my_task/run.yaml

Unchanged, the task trains in minutes without a GPU. Replace the data, the reward and the model step by step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pydantic import ValidationError

from megagrpo.config import ConfigError, RunSection
from megagrpo.config.json_schema import schema_text
from megagrpo.platform.process.terminal import show

RUN = """\
# yaml-language-server: $schema=schema.json
# Inherits the quickstart: SmolLM2-135M-Instruct on a CPU. A key here replaces the inherited one; `megagrpo keys` lists
# all keys.
defaults: megagrpo:quickstart

run:
  name: {name}
  max_steps: 10

# model: {{path: Qwen/Qwen3-0.6B}} # a folder, or a model of the hub

data:
  train: {{source: train.jsonl}} # paths count from the folder of this file
  eval: {{source: heldout.jsonl}}

rewards:
  functions:
    - function: reward.py:correct
"""
REWARD = '''\
"""The reward of this task. megagrpo calls it in a worker process with lists: one entry per completion."""

import re
from decimal import Decimal

NUMBER = r"(?:(?<![\\w.)])[-\u2212])?\\d+(?:,\\d{3})*(?:\\.\\d+)?(?:[eE][-+]?\\d+)?"


def correct(completions, answer, **columns):
    """Return 1 where the completion has the right answer, else 0; None where the row has no answer.

    `answer` is the column of train.jsonl; **columns takes the others. If `answer` is a number (5, 5.0,
    "$1,000"), the last number of the completion must equal it. If it is another text, the completion must
    contain it, as words and in any case. A completion is a string, or a list of messages if the prompt is a
    list of messages.
    """
    scores = []
    for completion, right in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        right = "" if right is None else str(right).strip()
        if not right:
            scores.append(None)
        elif re.fullmatch(NUMBER, right.strip("$€£%. ")):
            numbers = re.findall(NUMBER, text)
            scores.append(float(bool(numbers) and value(numbers[-1]) == value(right.strip("$€£%. "))))
        else:
            words = rf"(?<!\\w){re.escape(right)}(?!\\w)"
            scores.append(float(re.search(words, text, re.IGNORECASE) is not None))
    return scores


def value(number):
    return Decimal(number.replace(",", "").replace("\u2212", "-"))
'''
README = """\
# {name}

| file | content |
|---|---|
| `run.yaml` | the config; it inherits the quickstart |
| `train.jsonl`, `heldout.jsonl` | one row per line: `prompt`, and `answer` for the reward |
| `reward.py` | the reward function |
| `schema.json` | with it, editors complete and check the keys of `run.yaml` |

```bash
megagrpo check {folder}/run.yaml     # data, one prompt, a call of the reward: seconds
megagrpo plan {folder}/run.yaml      # memory
megagrpo train {folder}/run.yaml     # train; writes runs/{name}
megagrpo eval {folder}/run.yaml --checkpoint latest
```

1. Put your rows into `train.jsonl`. Every column but `prompt` is an argument of the reward function.
2. Change `reward.py`, and run `megagrpo check` until the reward of a right answer is what you want.
3. Name your model in `run.yaml` (`model.path`), and raise `rollout.max_completion_length` and `run.max_steps`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo init`."""
    parser.add_argument(
        "folder", type=Path, metavar="NAME", help="folder to create; its last part is the name of the run"
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
    files = {
        "run.yaml": RUN.format(name=name),
        "reward.py": REWARD,
        "train.jsonl": addition_rows(range(57)),
        "heldout.jsonl": addition_rows(range(57, 69)),
        "README.md": README.format(name=name, folder=folder),
        "schema.json": schema_text(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"megagrpo init: {folder} cannot be written: {error.strerror}; choose another name"
        ) from error
    show(
        f"created {folder}: {', '.join(files)}\n\nnext:\n  megagrpo check {folder}/run.yaml\n  megagrpo train "
        f"{folder}/run.yaml"
    )
    return 0


def addition_rows(indices: range) -> str:
    """Return one JSON line per index, from 0 to 80, of the 81 additions of numbers from 1 to 9, in mixed order."""
    pairs = [(1 + index * 7 % 81 // 9, 1 + index * 7 % 81 % 9) for index in indices]
    return "".join(json.dumps({"prompt": f"What is {a} + {b}?", "answer": str(a + b)}) + "\n" for a, b in pairs)
