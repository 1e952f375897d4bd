"""Prints the JSON schema of a config, with which editors complete keys, show their meaning and mark mistakes.

    megagrpo schema -o megagrpo.schema.json

Put `# yaml-language-server: $schema=megagrpo.schema.json` into the first line of a config; the YAML extensions of VS
Code, JetBrains, Neovim and Emacs read it. configs/schema.json is this schema, and the shipped configs name it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megagrpo.config import ConfigError
from megagrpo.config.json_schema import schema_text
from megagrpo.platform.process.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo schema`."""
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to FILE instead of standard output")


def run(options: argparse.Namespace) -> int:
    """Print or write the schema. Raises ConfigError for a file that cannot be written."""
    if options.output is None:
        show(schema_text().rstrip("\n"))
        return 0
    try:
        options.output.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output: {options.output} cannot be written: {error.strerror}; name another file"
        ) from error
    return 0
