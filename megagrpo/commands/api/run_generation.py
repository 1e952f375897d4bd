"""Responses of a run's model: the request is checked here and answered by `generation_process.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megagrpo.commands.api import child_process
from megagrpo.commands.api.errors import CommandFailed
from megagrpo.config import ConfigError
from megagrpo.platform.process.removal import temporary_folder
from megagrpo.rewards.target import did_you_mean

type Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or a conversation: messages with `role` and `content`."""

OPTIONS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")


def generate(
    config: Path, prompts: Any, n: int | None, checkpoint: str | os.PathLike[str] | None, options: Mapping[str, Any]
) -> Any:
    """See `Run.generate`. `config` is the run's resolved config."""
    _check(options, n)
    single = _is_prompt(prompts)
    listed = [prompts] if single else list(prompts)
    if not listed:
        return []
    for i, prompt in enumerate(listed):
        if not _is_prompt(prompt):
            raise ConfigError(
                f"prompts.{i}: must be a text or a list of messages with `role` and `content` (got {prompt!r:.200})"
            )
    request = {
        "config": str(config),
        "prompts": [prompt if isinstance(prompt, str) else [dict(message) for message in prompt] for prompt in listed],
        "n": n or 1,
        "checkpoint": None if checkpoint is None else os.fspath(checkpoint),
        "options": {name: value for name, value in options.items() if value is not None},
    }
    with temporary_folder("megagrpo_generate_") as folder:
        question, answer = folder / "request.json", folder / "answer.json"
        question.write_text(json.dumps(request))
        ended = child_process.run("megagrpo.commands.api.generation_process", [str(question), str(answer)])
        if ended.exit_code:
            raise CommandFailed("Run.generate", ended.exit_code, ended.output)
        texts = json.loads(answer.read_text())
    texts = [of_prompt[0] for of_prompt in texts] if n is None else texts
    return texts[0] if single else texts


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in value)
    )


def _check(options: Mapping[str, Any], n: int | None) -> None:
    """Raise ConfigError for an option that is unknown or out of its range."""
    from megagrpo.commands.generate import RULES

    for name in options:
        if name not in OPTIONS:
            raise ConfigError(
                f"{name}: unknown option of generate{did_you_mean(name, OPTIONS)}; it takes {', '.join(OPTIONS)}"
            )
    for name, fits, rule in RULES:
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not fits(value)):
            raise ConfigError(f"{name}: must be {rule} (got {value!r})")
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise ConfigError(f"n: must be a positive number (got {n!r})")
