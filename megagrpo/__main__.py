"""`megagrpo COMMAND ...`: parses the command line and calls the command, `commands/COMMAND.py`."""

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
from typing import Any, NoReturn

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
OF_LAYOUTS, OF_PRECISION = {"layout", "ranks", "full"}, {"threshold", "tokens", "fix"}  # options of `verify` without and with --precision


@dataclass(frozen=True)
class Command:
    """A parsed command line. `sizes` are the key=value arguments of `plan` that are no keys of the config; `options` begin with --."""

    name: str
    config_path: Path
    overrides: list[str]
    config: RunConfig
    sizes: dict[str, Any]
    options: dict[str, Any]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n\n{USAGE}")


def parse(arguments: list[str]) -> Command:
    """Return the command with its loaded config. Raises ConfigError for a wrong command line or config, SystemExit(0) after `--help`."""
    parser = _Parser(prog="megagrpo", add_help=False)
    parser.add_argument("command", nargs="?", choices=list(OPTIONS))
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*")
    for option, settings in {name: settings for options in OPTIONS.values() for name, settings in options.items()}.items():
        parser.add_argument(f"--{option.replace('_', '-')}", default=argparse.SUPPRESS, **settings)
    parser.add_argument("-h", "--help", action="store_true")
    parsed, unparsed = parser.parse_known_intermixed_args(arguments)
    if parsed.help:
        print(USAGE if parsed.command is None else f"{USAGE}\n\n{render_help()}")
        raise SystemExit(0)
    if parsed.config is None:
        parser.error("needs a command and a config file")
    options = {name: value for name, value in vars(parsed).items() if name not in ("command", "config", "overrides", "help")}
    for foreign in options.keys() - OPTIONS[parsed.command].keys():
        parser.error(f"--{foreign.replace('_', '-')}: {parsed.command} has no such option")
    if parsed.command == "verify":
        precision = "precision" in options
        for foreign in options.keys() & (OF_LAYOUTS if precision else OF_PRECISION):
            parser.error(f"--{foreign}: verify {'with' if precision else 'without'} --precision has no such option")
    overrides = [*parsed.overrides, *unparsed]
    sizes: dict[str, Any] = {}
    if parsed.command == "plan":
        from megagrpo.commands.plan import split_sizes

        overrides, sizes = split_sizes(overrides)
    if options.pop("resume", False):
        overrides.append("run.resume=true")
    for name in ("ranks", "threshold", "tokens"):
        if not options.get(name, 1) > 0:
            raise ConfigError(f"--{name}: must be a positive number (got {options[name]})")
    config = load_config(parsed.config, overrides)
    return Command(parsed.command, Path(parsed.config), overrides, config, sizes, options)


@contextlib.contextmanager
def _imports() -> Iterator[None]:
    """Context manager: imports inside it run without the garbage collector, which later ignores the imported objects.

    Collecting while torch and its dependencies are imported takes a quarter of the time of a short command.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@temporary_files()
def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. Its temporary files are removed."""
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
            from megagrpo.commands import plan

            return plan.main(command.config, **command.sizes, **command.options)
        if command.name == "verify":
            with _imports():
                from megagrpo.commands import verify, verify_precision
            module = verify_precision if command.options.pop("precision", False) else verify
            return module.main(command.config_path, command.overrides, **command.options)
        if command.name == "serve":
            with _imports():
                from megagrpo.commands import serve
            return serve.main(command.config, **command.options)
        if command.name == "eval":
            with _imports():
                from megagrpo.commands import eval as evaluation
            return evaluation.main(command.config, command.config_path, **command.options)
        with _imports():
            from megagrpo.commands import train
        return train.main(command.config, command.config_path)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            warn(error)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
