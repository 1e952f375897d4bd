"""What files on this machine say against a run, or what its user should know: the model's folder, the data, the run's folder.

Files that are elsewhere, as on a hub, are left to the run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megagrpo.config import Problem, RunConfig
from megagrpo.policy.hf_config import HfConfig


def output_problems(config: RunConfig) -> list[Problem]:
    """A folder for runs that cannot be made or written to."""
    folder = Path(config.run.output_dir)
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    if there.is_dir() and os.access(there, os.W_OK):
        return []
    why = "cannot be written to" if there.is_dir() else "is no folder"
    return [Problem(("run.output_dir",), f"{folder}: {there} {why}; name another folder", rule=25)]


def data_notes(config: RunConfig) -> list[Problem]:
    """Fewer prompts than one step draws: it would draw some of them twice."""
    data, wanted = config.data.train, config.rollout.prompts_per_step
    path, rows = Path(data.source), data.size
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as lines:
            there = sum(1 for line in lines if line.strip())
        rows = there if rows is None else min(rows, there)
    if rows is None or rows >= wanted:
        return []
    said = f"{rows} prompts, and a step draws {wanted} (rollout.prompts_per_step), so some come twice; lower it or add prompts"
    return [Problem(("data.train", "rollout.prompts_per_step"), said, rule=13)]


def tokenizer_notes(config: RunConfig, model: HfConfig) -> tuple[list[Problem], list[Problem]]:
    """(problems, notes) of a tokenizer that is a folder here."""
    folder = Path(config.model.tokenizer or config.model.path).expanduser()
    settings, problems, notes = _read(folder / "tokenizer_config.json"), [], []
    if not settings:
        return [], []
    template = "chat_template" in settings or (folder / "chat_template.jinja").exists()
    if not template and config.data.chat_template is None:
        said = f"the tokenizer in {folder} has no chat template, as base models; set one, or `none` for plain text"
        notes.append(Problem(("data.chat_template", "model.tokenizer"), said, rule=16))
    tokens = _read(folder / "tokenizer.json")
    ids = list(tokens.get("model", {}).get("vocab", {}).values()) if isinstance(tokens.get("model", {}).get("vocab"), dict) else []
    ids += [token["id"] for token in tokens.get("added_tokens", [])]
    if ids and max(ids) >= model.vocab_size:
        said = f"token {max(ids)} of {folder} is outside of the model's vocab_size {model.vocab_size}; name the model's own tokenizer"
        problems.append(Problem(("model.tokenizer", "model.path"), said, rule=19))
    ends, raw = _read(folder / "generation_config.json").get("eos_token_id"), model.raw.get("eos_token_id")
    if ends is not None and raw is not None and set(_list(ends)) != set(_list(raw)):
        said = f"generation_config.json ends responses at {_list(ends)}, config.json at {_list(raw)}; see that both are meant"
        notes.append(Problem(("model.tokenizer", "model.path"), said, rule=17))
    return problems, notes


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
