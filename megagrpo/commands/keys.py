"""Lists the keys of a config with their types, defaults and meaning. docs/config.md has the same table.

megagrpo keys
megagrpo keys rollout
megagrpo keys train.learning_rate
"""

from __future__ import annotations

import argparse

from megagrpo.commands.parser import nearest
from megagrpo.config import ConfigError, RunConfig, render_help
from megagrpo.config.io import fields
from megagrpo.process.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo keys`."""
    parser.add_argument("section", nargs="?", default="", metavar="SECTION", help="a section, or one key (default: everything)")


def run(options: argparse.Namespace) -> int:
    """Print the keys. Raises ConfigError for an unknown section."""
    text = render_help(options.section)
    if not text:
        known = [key for key, _ in fields(RunConfig)]
        sections = ", ".join(RunConfig.model_fields)
        raise ConfigError(f"megagrpo keys: {options.section} is no key{nearest(options.section, known)}; sections: {sections}")
    show(text)
    return 0
