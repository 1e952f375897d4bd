"""The arguments CONFIG and key=value of the commands that read the config of a run."""

from __future__ import annotations

import argparse

from megagrpo.config import RunConfig, absolute_override, load_config

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


def load(options: argparse.Namespace) -> RunConfig:
    """Return the config with overrides. Raises ConfigError that lists all problems and names the config as typed."""
    return load_config(options.config, overrides(options))
