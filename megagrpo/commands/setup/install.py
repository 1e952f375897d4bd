"""Installs what a wheel of megagrpo cannot require: vLLM's build for this machine, its requirements, and more extras.

    megagrpo install              # what fits this machine, and a small model
    megagrpo install gpu wandb
    megagrpo install data         # one more extra

`gpu` also brings Transformer Engine, whose torch extension is compiled. Versions are the tested ones, from the
package's constraints. Exit codes: 0 when everything imports, 1 when an installer or an import fails, 2 for bad input.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys

from megagrpo.platform.install.requirements import InstallError, choosable
from megagrpo.platform.install.steps import (
    HEADER_FOLDERS,
    Choice,
    check_compiler,
    check_libraries,
    choose,
    find_installer,
    step_environment,
    steps,
)
from megagrpo.platform.process.terminal import show, warn
from megagrpo.platform.process.variables import ENVIRONMENT

IMPORTS = "import torch, transformers, vllm, megatron.core"
FAILED_IMPORT_LINES = 5  # of its output, shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo install`."""
    add = parser.add_argument
    add("extras", nargs="*", metavar="EXTRA", help=f"cpu or gpu, and more extras: {', '.join(_extras())}")
    add(
        "--without",
        action="append",
        default=[],
        metavar="EXTRA",
        help="leave out an extra that comes along, for example te or quickstart",
    )
    add(
        "--installer", choices=("uv", "pip"), help="default: the one that installed megagrpo, else the one that is here"
    )
    add(
        "--any-version",
        action="store_true",
        help="let the installer choose any version in megagrpo's ranges, not only the tested one",
    )
    add(
        "--compile-bytecode",
        action="store_true",
        help="compile all modules now, which takes minutes; else their first import does it",
    )
    add("--print", action="store_true", help="print the commands and install nothing")
    add("--quiet", action="store_true", help="no progress of the installer")
    add("--editable", action="store_true", help="install the checkout that holds this command, as launch/setup.sh does")


def _extras() -> list[str]:
    try:
        return choosable()
    except InstallError:
        return []


def run(options: argparse.Namespace) -> int:
    """Install the chosen extras, import the packages, and return the exit code."""
    try:
        choice = choose(
            options.extras,
            options.without,
            editable=options.editable,
            tested_versions=not options.any_version,
            bytecode=options.compile_bytecode,
            quiet=options.quiet,
        )
        if not options.print:
            check_compiler(choice)
            check_libraries(choice)
        commands = steps(choice, find_installer(options.installer))
    except InstallError as error:
        warn(f"megagrpo install: {error}")
        return 2
    for step in commands:
        line = shlex.join(step.command)
        if options.print:
            show(f"CPLUS_INCLUDE_PATH=$(printf '%s:' {HEADER_FOLDERS}) {line}" if step.headers else line)
        elif code := subprocess.run(step.command, env=step_environment(step)).returncode:
            warn(f"megagrpo install: exit code {code}, see the message above, from\n  {line}")
            return 1
    return 0 if options.print else _check_imports(choice)


def _check_imports(choice: Choice) -> int:
    """Import a run's packages in a new process, if installed. Return 1 and print the end of the output on a failure."""
    ready = f"megagrpo install: ready ({choice.kind}: {', '.join(choice.extras)})"
    if choice.kind not in choice.extras:
        show(ready)
        return 0
    # later imports are twice as fast
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONDONTWRITEBYTECODE"}
    checked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORTS], env=environment, capture_output=True, text=True
    )
    if checked.returncode:
        warn("megagrpo install: the packages are installed, but importing them fails:")
        warn("\n".join((checked.stdout + checked.stderr).splitlines()[-FAILED_IMPORT_LINES:]))
        return 1
    show(f"{ready}; try: megagrpo train megagrpo:quickstart" if "quickstart" in choice.extras else ready)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command by itself: `python -m megagrpo.commands.setup.install` works before any package is installed."""
    parser = argparse.ArgumentParser(
        prog="megagrpo install", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
