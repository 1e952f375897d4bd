"""Drafts the file of a family that megagrpo does not support yet, from a config.json.

    megagrpo new-family FOLDER_OR_CONFIG
    megagrpo new-family config.json --out my_family.py

Builds transformers' own model of that type without weights, and takes the parts of a family whose tensors the model
has. Writes the draft to megagrpo/families/own/ of this installation, and the example for the tests, a JSON file,
to tests/data/families/ of the clone. With --out, or without a clone, the JSON file is beside the draft. Lists what is
left to do: unknown keys and tensors, and transformers' code to compare. Of a multimodal model it drafts
the text model, and lists the line of code for the model around it. docs/add_a_model.md describes the rest. Exit
code 0: the draft is written, 2: the config cannot be read, or a file exists.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megagrpo.commands.api.conversions import hide_gpus
from megagrpo.config import ConfigError, ProblemError
from megagrpo.platform.process.imports import without_garbage_collection
from megagrpo.platform.process.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo new-family`."""
    add = parser.add_argument
    add("model", type=Path, metavar="FOLDER_OR_CONFIG", help="config.json, or the folder that holds it")
    add("--out", type=Path, metavar="FILE", help="file to write (default: families/own)")


def _text_model(raw: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return config.json of the text model, and the line of code for the multimodal model around it; "" for a model of
    text."""
    if not isinstance(text := raw.get("text_config"), dict):
        return raw, ""
    classes = raw.get("architectures") or ["TODO"]
    return text, f'wrappers=(Wrapper("{raw.get("model_type")}", "{classes[0]}"),),'


def run(options: argparse.Namespace) -> int:
    """Write the draft, and return the exit code. Raises ConfigError if one of its files exists."""
    hide_gpus()
    with without_garbage_collection():
        from megagrpo.families.family_index import family_of
        from megagrpo.families.hf_config import read_raw_config
        from megagrpo.weights.bridge.family_draft import draft_family, examples_folder, families_folder
    if options.model.name != "config.json" and not options.model.is_dir():
        raise ConfigError(f"{options.model} is neither a folder nor a config.json; name one")
    raw = read_raw_config(options.model if options.model.is_dir() else options.model.parent)
    raw, line = _text_model(raw)
    kind = str(raw.get("model_type"))
    if line and family_of(kind):
        raise ConfigError(f"{options.model}: its text model {kind} is supported; add to its file: {line}")
    if family_of(kind) and options.out is None:
        raise ConfigError(f"{options.model}: model_type {kind} is supported; name a file with --out to draft it anyway")
    out = options.out or families_folder() / f"{kind}.py"
    example = (out.parent if options.out else examples_folder() or out.parent) / f"{out.stem}.json"
    if existing := next((file for file in (out, example) if file.exists()), None):
        raise ConfigError(f"--out: {existing} exists; name a new file")
    try:
        draft = draft_family(raw)
    except ProblemError as error:
        raise ConfigError(str(error)) from None
    out.write_text(draft.text)
    example.write_text(draft.example)
    tasks = [*draft.tasks, *([f"add {line}"] if line else [])]
    lines = [f"{out}: {' | '.join(draft.parts)}", *(f"  {task}" for task in tasks), f"{example}: the example"]
    show("\n".join([*lines, f"next: finish both files, then python -m tests.prove_family {kind}"]))
    return 0
