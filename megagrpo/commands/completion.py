"""Prints a completion script of `megagrpo` for a shell.

eval "$(megagrpo completion bash)"
megagrpo completion zsh > "${fpath[1]}/_megagrpo"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megagrpo.commands import COMMANDS
from megagrpo.commands.parser import build

SHELLS = ("bash", "zsh", "tcsh")
FILES = ("config", "cluster", "model", "path")  # names of arguments that a shell completes to files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo completion`."""
    parser.add_argument("shell", choices=SHELLS)


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    top, parsers = build(COMMANDS)
    for parser in parsers.values():
        for action in parser._actions:
            if action.dest in FILES or action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(top, options.shell))
    return 0
