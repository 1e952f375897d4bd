"""Prints a completion script of `megagrpo` for bash or zsh.

    eval "$(megagrpo completion bash)"    # in ~/.bashrc
    eval "$(megagrpo completion zsh)"     # in ~/.zshrc, after compinit

It completes commands, options and their choices, shipped configs and clusters, keys of a config, and files. The script
holds these names, so it starts no Python. Print it again after an update of megagrpo.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from megagrpo.commands import COMMANDS
from megagrpo.commands.launch import WITH_RANKS
from megagrpo.commands.parser import build
from megagrpo.config import RunConfig
from megagrpo.config.io import SHIPPED, shipped_clusters, shipped_names
from megagrpo.config.key_table import fields, section_of
from megagrpo.planner.costs.gpu_specs import GPUS
from megagrpo.platform.install.requirements import choosable
from megagrpo.platform.process.terminal import show

# `words` are the completions; without one that fits, the shell completes files. bash divides words at colons.
COMPLETION_SCRIPT = """
_megagrpo() {{
    local command=${{COMP_WORDS[1]}} before=${{COMP_WORDS[COMP_CWORD-1]}} current=${{COMP_WORDS[COMP_CWORD]}}
    local words= options= names='{names}' keys= configs='{configs}'
    if [[ $current ]]; then keys='{keys}'; fi
    if [[ $COMP_CWORD == 1 ]]; then words='{commands}' options='--help --version'
    elif [[ $current == : || $before == : ]]; then words=$names current=${{current#:}}
    else
        case "$command $before" in
{cases}
        esac
    fi
    if [[ $current == -* ]]; then words=$options; fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ $BASH && ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace; fi
}}
"""
REGISTRATIONS = {
    "bash": "complete -o default -o nosort -F _megagrpo megagrpo",
    "zsh": "autoload -Uz bashcompinit && bashcompinit\ncomplete -o default -F _megagrpo megagrpo",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo completion`."""
    parser.add_argument("shell", choices=tuple(REGISTRATIONS))


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    keys = [f"{key.replace('.N.', '.0.')}=" for key, field in fields(RunConfig) if not section_of(field.annotation)]
    listed: dict[str, Iterable[str]] = {
        "commands": COMMANDS,
        "names": shipped_names(),
        "configs": [SHIPPED + name for name in shipped_names()],
        "keys": [key for key in keys if "NAME" not in key],
    }
    lists = {name: " ".join(words) for name, words in listed.items()}
    show(COMPLETION_SCRIPT.format(**lists, cases="\n".join(_cases())).lstrip() + REGISTRATIONS[options.shell])
    return 0


def _cases() -> Iterator[str]:
    """Yield a case per option that has choices, and then one per command: its options, and what its arguments take."""
    choices = {"EXTRA": choosable(), "KIND": list(GPUS), "COMMAND": list(WITH_RANKS), "CLUSTER": shipped_clusters()}
    choices |= {"CONFIG": ["$configs"], "CONFIG_OR_MODEL": ["$configs"], "key=value": ["$keys"]}
    for command, parser in build(COMMANDS)[1].items():
        names, words = list[str](), list[str]()
        for action in parser._actions:
            values = [str(value) for value in action.choices or choices.get(str(action.metavar), ())]
            names += action.option_strings
            words += [] if action.option_strings else values
            if action.option_strings and values:
                patterns = "|".join(f"'{command} {name}'" for name in action.option_strings)
                yield f'        {patterns}) words="{" ".join(values)}" ;;'
        yield f"        '{command} '*) words=\"{' '.join(words)}\" options='{' '.join(names)}' ;;"
