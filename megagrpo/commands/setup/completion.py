"""Prints a completion script of `megagrpo` for a shell.

    eval "$(megagrpo completion bash)"
    megagrpo completion zsh > "${fpath[1]}/_megagrpo"
    megagrpo completion fish > ~/.config/fish/completions/megagrpo.fish

It completes commands, options, shipped configs and clusters, runs and checkpoints, and the keys of a config with their
choices. The script holds these names, so it starts no Python. Print it again after an update of megagrpo.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from megagrpo.cluster.launch.job import shipped_clusters
from megagrpo.commands import COMMANDS
from megagrpo.commands.launch import WITH_RANKS
from megagrpo.commands.parser import build
from megagrpo.config import RunConfig
from megagrpo.config.io import SHIPPED, shipped_names
from megagrpo.config.key_table import fields, section_of
from megagrpo.planner.costs.gpu_specs import GPUS
from megagrpo.platform.install.requirements import choosable
from megagrpo.platform.process.terminal import show

# What an argument takes, by its metavar; a kind is a function of `COMPLETION_PROGRAM`. Others take a file if their type
# is Path, and else any text.
ARGUMENT_KINDS = {
    "CONFIG": "config",
    "CONFIG_OR_MODEL": "config",
    "key=value": "key",
    "CLUSTER": "cluster",
    "RUN": "run",
    "latest|best|PATH": "newest",
    "CHECKPOINT": "checkpoint",
    "PATH": "checkpoint",
    "SECTION": "section",
}

# Prints the completions of the last argument, one per line: sh -c COMPLETION_PROGRAM megagrpo WORD...; nothing where
# the shell should complete files. `@...@` are the tables, lines of: a command, the name or position of its argument,
# and what it takes.
COMPLETION_PROGRAM = r"""
offer() { for each; do case $each in "$current"*) printf '%s\n' "$each" ;; esac; done; }
folders() { for each in "$current"*/; do [ -d "$each" ] && printf '%s\n' "$each"; done; }
yaml() { for each in "$current"*.yaml "$current"*.yml; do [ -f "$each" ] && printf '%s\n' "$each"; done; folders; }
config() { case $current in megagrpo:*) offer @CONFIGS@ ;; *) offer megagrpo:; yaml ;; esac; }
cluster() { offer @CLUSTERS@; yaml; }
run() { for each in runs/*/; do [ -f "${each}resolved.yaml" ] && offer "${each%/}"; done; folders; }
checkpoint() { for each in runs/*/checkpoints/step_*; do [ -d "$each" ] && offer "$each"; done; folders; }
newest() { offer latest best; checkpoint; }
section() { case $current in *.*) offer @KEYS@ ;; *) offer @SECTIONS@ ;; esac; }
key() {
    case $current in
    *=*) choices "${current%%=*}" ;;
    *.*) suffix '=' "$(offer @KEYS@)" ;;
    *) suffix '.' "$(offer @SECTIONS@)" ;;
    esac
}
suffix() { for each in $2; do printf '%s\n' "$each$1"; done; }
choices() {
    while read -r name values; do
        [ "$name" = "$1" ] && for each in $values; do offer "$name=$each"; done
    done <<'END'
@CHOICES@
END
}
takes() { # sets `kind` to what argument $2 of command $1 takes; fails without one
    while read -r of name kind; do
        [ "$of $name" = "$1 $2" ] && return
    done <<'END'
@ARGUMENTS@
END
    return 1
}
options() {
    while read -r of name kind; do
        case "$of $name" in "$command "-*) offer "$name" ;; esac
    done <<'END'
@ARGUMENTS@
END
}
command= option= position=0 current=
while [ $# -gt 1 ]; do
    if [ -z "$command" ]; then command=$1
    elif [ -n "$option" ]; then option=
    else
        case $1 in
        -*) takes "$command" "$1" && [ -n "$kind" ] && option=$1 ;;
        *) position=$((position + 1)) ;;
        esac
        if [ "$command $position" = 'launch 2' ]; then command=$1 position=0; fi
    fi
    shift
done
current=${1-}
if [ -z "$command" ]; then offer @COMMANDS@ --help --version; exit; fi
case $option$current in
-*) if [ -z "$option" ]; then options; exit; fi ;;
esac
takes "$command" "${option:-$((position + 1))}" || takes "$command" '*' || exit 0
case $kind in
=*) offer ${kind#=} ;;
file | any) ;;
*) $kind ;;
esac
"""
BASH = """
_megagrpo_program={program}
_megagrpo() {{
    local line=${{COMP_LINE:0:COMP_POINT}} breaks=${{COMP_WORDBREAKS//[^=:]/}} words word replaced index
    read -a words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=('')
    word=${{words[-1]}}
    mapfile -t COMPREPLY < <(sh -c "$_megagrpo_program" megagrpo "${{words[@]:1}}")
    replaced=${{word##*["${{breaks:-/}}"]}} # readline keeps what stands before it
    [[ $breaks ]] || replaced=$word
    for index in "${{!COMPREPLY[@]}}"; do
        printf -v "COMPREPLY[index]" %q "${{COMPREPLY[index]#"${{word%"$replaced"}}"}}"
    done
    [[ ${{#COMPREPLY[@]}} == 1 && ${{COMPREPLY[0]}} == *[=./:] ]] && compopt -o nospace
}}
complete -o default -F _megagrpo megagrpo"""
ZSH = """#compdef megagrpo
_megagrpo_program={program}
_megagrpo() {{
    local -a found whole
    found=("${{(@f)$(sh -c "$_megagrpo_program" megagrpo "${{(@Q)words[2,CURRENT-1]}}" "${{(Q)PREFIX}}")}}")
    found=(${{found:#}})
    if (( ! $#found )); then compset -P '*='; _files; return; fi
    whole=(${{found:#*[=./:]}})
    compadd -a whole
    found=(${{(M)found:#*[=./:]}})
    compadd -S '' -a found
}}
if [ "$funcstack[1]" = _megagrpo ]; then _megagrpo "$@"; else compdef _megagrpo megagrpo; fi"""
FISH = """set -g __megagrpo_program {program}
function __megagrpo_complete
    set -l words (commandline -opc)
    set -l word (commandline -ct | string unescape | string collect --allow-empty)
    set -l found (sh -c "$__megagrpo_program" megagrpo $words[2..-1] "$word")
    if set -q found[1]
        printf '%s\\n' $found
    else
        set -l key (string match -r '^(?:.*=)?' -- "$word")
        string replace -r '^' $key -- (__fish_complete_path (string replace -r '^.*=' '' -- "$word"))
    end
end
complete -c megagrpo -f -a '(__megagrpo_complete)'"""
TCSH = "complete megagrpo 'p/1/({commands})/' 'c/--/({options})/' 'n/--cluster/({clusters})/' 'p/*/f/'"
SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo completion`."""
    parser.add_argument("shell", choices=SHELLS)


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    arguments = list(_arguments())
    clusters = " ".join(shipped_clusters())
    if options.shell == "tcsh":
        names = sorted({name.removeprefix("--") for _, name, _ in arguments if name.startswith("--")})
        show(TCSH.format(commands=" ".join(COMMANDS), options=" ".join(names), clusters=clusters))
        return 0
    keys = {
        key.replace(".N.", ".0."): field
        for key, field in fields(RunConfig)
        if not section_of(field.annotation) and "NAME" not in key
    }
    choices = {key: _choices(field.annotation) for key, field in keys.items()}
    program = COMPLETION_PROGRAM
    for name, text in {
        "COMMANDS": " ".join(COMMANDS),
        "CONFIGS": " ".join(SHIPPED + name for name in shipped_names()),
        "CLUSTERS": clusters,
        "SECTIONS": " ".join(RunConfig.model_fields),
        "KEYS": " ".join(keys),
        "CHOICES": "\n".join(f"{key} {' '.join(values)}" for key, values in choices.items() if values),
        "ARGUMENTS": "\n".join(map(" ".join, arguments)),
    }.items():
        program = program.replace(f"@{name}@", text)
    if options.shell == "fish":
        show(FISH.format(program="'" + program.replace("\\", "\\\\").replace("'", "\\'") + "'"))
    else:
        show((BASH if options.shell == "bash" else ZSH).format(program=shlex.quote(program)))
    return 0


def _arguments() -> Iterator[tuple[str, str, str]]:
    """Yield (command, name of an option or position of an argument, what it takes) for all commands: a kind, `=` and
    the choices, or nothing for a switch. `*` is every further position."""
    choices = {"EXTRA": choosable(), "KIND": list(GPUS), "COMMAND": list(WITH_RANKS)}
    for command, parser in build(COMMANDS)[1].items():
        position = 0
        for action in parser._actions:
            takes = ARGUMENT_KINDS.get(str(action.metavar), "file" if action.type is Path else "any")
            if values := action.choices or choices.get(str(action.metavar)):
                takes = f"={' '.join(map(str, values))}"
            if action.option_strings:
                for name in action.option_strings:
                    yield command, name, "" if action.nargs == 0 else takes
            else:
                position += 1
                yield command, "*" if action.nargs in ("*", "+") else str(position), takes


def _choices(annotation: Any) -> list[str]:
    """Return the values of a key that has a few, as YAML text."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) in (list, dict):
        return []
    parts = [part for part in get_args(annotation) if part is not NoneType]
    found = [value for part in parts for value in _choices(part)]
    return [*found, "null"] if found and NoneType in get_args(annotation) else found
