"""The arguments CONFIG and key=value of the commands that read the config of a run."""

from __future__ import annotations

import argparse

from megagrpo.config import ConfigError, RunConfig, absolute_override, load_config
from megagrpo.config.io import read_yaml
from megagrpo.config.sections.loss_table import LOSSES, ROW_LOSSES

KEYS_HELP = """CONFIG is a YAML file, or megagrpo:NAME for a config that is shipped with megagrpo. key=value replaces a
value of it, as in train.learning_rate=1e-5 or rewards.functions.0.weight=2; a key of text takes the text as it is
typed. `megagrpo keys` and docs/config.md describe every key."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and key=value."""
    add = parser.add_argument
    add("config", metavar="CONFIG", help="YAML file of a run, or megagrpo:NAME")
    add("overrides", nargs="*", default=[], metavar="key=value", help="value of the config to replace")
    parser.epilog = KEYS_HELP


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add --resume, which `overrides` turns into the config's key."""
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint (run.resume=true)")


def overrides(options: argparse.Namespace) -> list[str]:
    """Return the words key=value, also from options, with absolute paths: other processes may run in another folder."""
    words = list(map(absolute_override, options.overrides))
    named = any(word.lstrip("-").startswith("run.resume=") for word in words)
    return [*words, *["run.resume=true"] * (getattr(options, "resume", False) and not named)]


def method_words(options: argparse.Namespace, method: str, loss_type: str) -> list[str]:
    """Return `overrides` with a loss of this method: the config's own if it has one, else `loss_type`. Raises
    ConfigError for a loss of another method on the command line."""
    words, values = overrides(options), read_yaml(options.config).get("algorithm")
    key = "algorithm.loss_type="
    if typed := [word.lstrip("-").removeprefix(key) for word in words if word.lstrip("-").startswith(key)]:
        if typed[-1] in LOSSES or (typed[-1] in ROW_LOSSES and ROW_LOSSES[typed[-1]].method != method):
            known = ", ".join(name for name, row in ROW_LOSSES.items() if row.method == method)
            raise ConfigError(
                f"algorithm.loss_type: {typed[-1]} is no loss of megagrpo {method}; choose one of {known}"
            )
        return words
    own = ROW_LOSSES.get(str(values.get("loss_type"))) if isinstance(values, dict) else None
    return words if own is not None and own.method == method else [f"{key}{loss_type}", *words]


def load(options: argparse.Namespace) -> RunConfig:
    """Return the config with overrides. Raises ConfigError that lists all problems and names the config as typed."""
    return load_config(options.config, overrides(options))
