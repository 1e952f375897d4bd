"""Lists the keys of a config with their types, defaults and meaning. docs/config.md has the same table.

megagrpo keys
megagrpo keys rollout
megagrpo keys train.learning_rate
"""

from __future__ import annotations

import argparse

from megagrpo.config import ConfigError, RunConfig, render_help
from megagrpo.config.io import nearest_key
from megagrpo.config.key_table import fields, section_of
from megagrpo.platform.process.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo keys`."""
    parser.add_argument(
        "section", nargs="?", default="", metavar="SECTION", help="a section, or one key (default: everything)"
    )


def run(options: argparse.Namespace) -> int:
    """Print the keys. Raises ConfigError for an unknown section."""
    text = render_help(options.section)
    if not text:
        name, known = (
            options.section,
            {key: section_of(field.annotation) is not None for key, field in fields(RunConfig)},
        )
        near = nearest_key(name.split("."), list(known))
        hint = f"; did you mean {'the section ' if known.get(near) else ''}{near}?" if near else ""
        raise ConfigError(
            f"megagrpo keys: {name} is neither a section nor a key{hint}; sections: {', '.join(RunConfig.model_fields)}"
        )
    show(text)
    return 0
