"""Reads the config of an API function (a YAML file, a shipped config, a mapping, a RunConfig) and its overrides."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.config import ConfigError, RunConfig, io, override_text, save_config

type ConfigLike = str | os.PathLike[str] | Mapping[str, Any] | RunConfig
"""A YAML file, a shipped config such as `megagrpo:quickstart`, a mapping of sections as in YAML, or a RunConfig."""

type Overrides = Mapping[str, Any] | Sequence[str]
"""Values by dotted key, as in `{"train.learning_rate": 1e-5}`, or texts as on the command line, as in
`["train.learning_rate=1e-5"]`."""

PYTHON_CONFIG = "config"  # the config's name in errors, when it is no file


@dataclass(frozen=True)
class Settings:
    """A config before validation. `file` names its YAML file or shipped config, None for a config made in Python."""

    values: dict[str, Any]  # what the config sets, `defaults:` included
    overrides: tuple[str, ...]
    file: str | None

    def validated(self, more: Sequence[str] = ()) -> RunConfig:
        """Return the config with the overrides, and with `more` of them. Raises ConfigError with every problem."""
        return io.validated(copy.deepcopy(self.values), [*self.overrides, *more], self.file or PYTHON_CONFIG)

    def words(self, folder: Callable[[], Path], more: Sequence[str] = ()) -> list[str]:
        """Return the config as arguments of a command. A config made in Python is written to a file in `folder()`."""
        if self.file is not None:
            return [self.file, *self.overrides, *more]
        file = folder() / "config.yaml"
        save_config(self.validated(more), file)
        return [str(file), *self.overrides, *more]


def read(config: ConfigLike, overrides: Overrides = ()) -> Settings:
    """Read a config. Relative paths in a mapping are relative to the current folder. Raises ConfigError."""
    texts = override_texts(overrides)
    if isinstance(config, RunConfig):
        return Settings(config.model_dump(mode="json"), texts, None)
    if isinstance(config, Mapping):
        return Settings(io.over_defaults(_plain(config, ""), Path(PYTHON_CONFIG)), texts, None)
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(
            f"{PYTHON_CONFIG}: must be a YAML file, a shipped config such as {io.SHIPPED}quickstart, a mapping or a "
            f"RunConfig (got {type(config).__name__})"
        )
    name = os.fspath(config)
    return Settings(io.read_yaml(name), texts, name)


def override_texts(overrides: Overrides) -> tuple[str, ...]:
    """Return overrides as arguments of a command. Raises ConfigError for values that YAML does not hold."""
    if isinstance(overrides, Mapping):
        return tuple(override_text(str(key), _plain(value, str(key))) for key, value in overrides.items())
    if isinstance(overrides, str) or not all(isinstance(text, str) for text in overrides):
        raise ConfigError('overrides: must be a mapping {"section.key": value} or a list of "section.key=value"')
    return tuple(overrides)


def _plain(value: Any, key: str) -> Any:
    """Return a value as YAML data: paths as strings, NumPy numbers as Python's. Raises ConfigError, with the key."""
    if isinstance(value, Mapping):
        return {str(name): _plain(below, f"{key}.{name}" if key else str(name)) for name, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(below, f"{key}.{i}") for i, below in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)  # the text of an Enum of texts, too
    if value is None or isinstance(value, (bool, int, float)):
        return value
    hint = (
        "pass functions as reward_functions and classes as callbacks"
        if callable(value)
        else "write numbers, texts, lists and mappings"
    )
    raise ConfigError(f"{key}: a {type(value).__name__} is not a value of a config; {hint}")
