"""`megagrpo train|plan|verify|eval CONFIG [key=value ...]` and the rest: parse, dispatch, nothing else."""

from __future__ import annotations

if __name__ == "__main__":  # before slow imports: a torchrun that is killed while ranks import leaves no rank
    from megagrpo.process.parent_death import end_with_torchrun

    end_with_torchrun()

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.config import ConfigError, RunConfig, load_config, render_help
from megagrpo.process.scratch import temporary_files
from megagrpo.process.terminal import log_to_stderr, warn

USAGE = """\
megagrpo train CONFIG [key=value ...] [--resume]    run GRPO as one rank; launch/local.sh starts every rank of this machine
megagrpo plan  CONFIG [key=value ...] [world_size=N] [gpu_memory_gb=G]    check a run and show what each rank holds; needs no GPU
megagrpo plan  CONFIG [key=value ...] --gpu h100|h200|b200|a100 [--search] [--json] [prompt_tokens=N] [response_tokens=N]    also seconds
megagrpo plan  CONFIG [key=value ...] --weight-sync [link_gb_per_s=50]    also what a weight sync moves between which ranks
megagrpo verify CONFIG [key=value ...] [--layout tp=2,pp=2,dp=2 ...] [--ranks N] [--json] [--full]    prove layouts against one process
megagrpo verify CONFIG [key=value ...] --precision [--threshold 0.2] [--tokens 2048] [--fix FILE] [--json]    what FP8 does to each layer
megagrpo serve CONFIG [key=value ...] --urls FOLDER [--reach HOST] ...    vLLM servers for a trainer elsewhere: docs/slurm.md
megagrpo eval  CONFIG [key=value ...] [--checkpoint latest|best|PATH] [--adapter FOLDER] [--output FILE]    evaluate held-out sets with vLLM
megagrpo generate CONFIG_OR_MODEL [PROMPT | -] [--checkpoint ...] [--adapter FOLDER] ...    ask a model, or talk to it; --help says more
megagrpo audit RUN --step N [--json] [--model FOLDER]    recompute a step that a run has dumped; needs no GPU

CONFIG is a YAML file; key=value replaces one of its values, as in train.learning_rate=1e-5 or rewards.functions.0.weight=2.
megagrpo COMMAND --help prints every key. Exit code 2: the config or the command line is wrong."""

PLAN_SIZES = {"world_size": int, "gpu_memory_gb": float, "link_gb_per_s": float, "prompt_tokens": float, "response_tokens": float}
_FLAG = dict(action="store_true")
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "train": {"resume": _FLAG},
    "plan": {"weight_sync": _FLAG, "gpu": {}, "search": _FLAG, "json": _FLAG},
    "eval": {"checkpoint": {}, "adapter": {}, "output": {}},
    "serve": {"reach": {}, "urls": dict(type=Path), "logs": dict(type=Path), "first_gpu": dict(type=int)},
    "verify": {
        **{"layout": dict(action="append"), "ranks": dict(type=int), "json": _FLAG, "full": _FLAG},
        **{"precision": _FLAG, "threshold": dict(type=float), "tokens": dict(type=int), "fix": dict(type=Path)},
    },
}
OF_LAYOUTS, OF_PRECISION = {"layout", "ranks", "full"}, {"threshold", "tokens", "fix"}  # options of the two kinds of `verify`


@dataclass(frozen=True)
class Command:
    """What the command line asks for. `sizes` are the arguments of `plan` that are no keys of the config, `options` those of the others."""

    name: str
    config_path: Path
    overrides: list[str]
    config: RunConfig
    sizes: dict[str, float]
    options: dict[str, Any]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(f"{message}\n\n{USAGE}")


def parse(arguments: list[str]) -> Command:
    """The command with its loaded config. ConfigError for a wrong command line or config; SystemExit(0) after `--help`."""
    parser = _Parser(prog="megagrpo", add_help=False)
    parser.add_argument("command", nargs="?", choices=list(OPTIONS))
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*")
    for option, settings in {name: settings for options in OPTIONS.values() for name, settings in options.items()}.items():
        parser.add_argument(f"--{option.replace('_', '-')}", default=argparse.SUPPRESS, **settings)
    parser.add_argument("-h", "--help", action="store_true")
    given, dashed = parser.parse_known_intermixed_args(arguments)
    if given.help:
        print(USAGE if given.command is None else f"{USAGE}\n\n{render_help()}")
        raise SystemExit(0)
    if given.config is None:
        parser.error("needs a command and a config file")
    options = {name: value for name, value in vars(given).items() if name not in ("command", "config", "overrides", "help")}
    for foreign in options.keys() - OPTIONS[given.command].keys():
        parser.error(f"--{foreign.replace('_', '-')}: {given.command} has no such option")
    if given.command == "verify":
        precision = "precision" in options
        for foreign in options.keys() & (OF_LAYOUTS if precision else OF_PRECISION):
            parser.error(f"--{foreign}: verify {'with' if precision else 'without'} --precision has no such option")
    overrides = [*given.overrides, *dashed]
    sizes = {}
    if given.command == "plan":
        overrides, sizes = _take_sizes(overrides)
        if "link_gb_per_s" in sizes and not options.get("weight_sync"):
            raise ConfigError("link_gb_per_s: only a plan of a weight sync reads it; add --weight-sync")
    if options.pop("resume", False):
        overrides.append("run.resume=true")
    for name in ("ranks", "threshold", "tokens"):
        if not options.get(name, 1) > 0:
            raise ConfigError(f"--{name}: must be a positive number (got {options[name]})")
    config = load_config(given.config, overrides)
    return Command(given.command, Path(given.config), overrides, config, sizes, options)


def _take_sizes(overrides: list[str]) -> tuple[list[str], dict[str, float]]:
    """The overrides without those that describe the machine, and these as positive numbers."""
    kept, sizes = [], {}
    for override in overrides:
        name, _, text = override.partition("=")
        if name not in PLAN_SIZES:
            kept.append(override)
            continue
        try:
            sizes[name] = PLAN_SIZES[name](text)
        except ValueError:
            sizes[name] = 0
        if not sizes[name] > 0:
            raise ConfigError(f"{name}: must be a positive number (got {text!r})")
    return kept, sizes


@contextlib.contextmanager
def _imports() -> Iterator[None]:
    """Without the garbage collector, now and later: it would look through all that torch and its like make as they are imported, again and
    again and once more at the end, which is a quarter of the time of a command that does little else."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@temporary_files()
def main(arguments: list[str] | None = None) -> int:
    """Runs one command; its exit code. Its temporary files are gone then."""
    arguments = sys.argv[1:] if arguments is None else arguments
    log_to_stderr()
    try:
        if arguments[:1] == ["audit"]:
            with _imports():
                from megagrpo.commands import audit
            return audit.main(arguments[1:])
        if arguments[:1] == ["generate"]:
            with _imports():
                from megagrpo.commands import generate
            return generate.main(arguments[1:])
        command = parse(arguments)
        if command.name == "plan":
            from megagrpo import plan

            return plan.main(command.config, **command.sizes, **command.options)
        if command.name == "verify":
            with _imports():
                from megagrpo.commands import verify, verify_precision
            main_of = verify_precision.main if command.options.pop("precision", False) else verify.main
            return main_of(command.config_path, command.overrides, **command.options)
        if command.name == "serve":
            with _imports():
                from megagrpo.commands import serve
            return serve.main(command.config, **command.options)
        if command.name == "eval":
            with _imports():
                from megagrpo.commands import eval as evaluation
            return evaluation.main(command.config, command.config_path, **command.options)
        with _imports():
            from megagrpo.trainer import wiring
        return wiring.main(command.config, command.config_path)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            warn(error)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
