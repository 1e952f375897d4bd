"""Checks this machine before the first run: driver, GPUs, packages, limits, memory and environment variables.

    megagrpo doctor                             # what any run needs
    megagrpo doctor my_run.yaml world_size=8    # what this run needs

Each line is a check: ok, warn, fail or skipped, what was found, and the fix. Nothing on the machine is changed, and
torch is not imported. Without a GPU it checks what a run on the CPU needs. Exit code 0: no check failed, 1: with
--strict, at least one warning, 2: a check failed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from megagrpo.commands.arguments.config_arguments import KEYS_HELP, overrides
from megagrpo.config.io import config_file
from megagrpo.platform.process.terminal import show, wrapped

if TYPE_CHECKING:
    from megagrpo.cluster.doctor.machine import Finding
    from megagrpo.cluster.doctor.needs import Needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo doctor`."""
    add = parser.add_argument
    add(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="YAML file of a run, or megagrpo:NAME; without it: what any run needs",
    )
    add("overrides", nargs="*", default=[], metavar="key=value", help="value of the config to replace, or world_size=N")
    add("--strict", action="store_true", help="exit with code 1 if there is a warning")
    add("--json", action="store_true", help="print JSON")
    parser.epilog = KEYS_HELP


def run(options: argparse.Namespace) -> int:
    """Print the findings, and return the exit code. Raises ConfigError for a wrong config."""
    from megagrpo.cluster.doctor.checkup import check_up, is_gpu_machine
    from megagrpo.cluster.doctor.machine import Machine

    machine = Machine()
    needs = _needs(options, is_gpu_machine(machine))
    findings = check_up(machine, needs)
    if options.json:
        show(json.dumps({"needs": asdict(needs), "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        show("\n".join(lines(findings)))
    return exit_code(findings, options.strict)


def _needs(options: argparse.Namespace, gpu: bool) -> Needs:
    from megagrpo.cluster.doctor.needs import Needs
    from megagrpo.commands.api.run_needs import needs_of
    from megagrpo.commands.plan import split_sizes
    from megagrpo.config import ConfigError, load_config

    if options.config is None:
        return Needs()
    words, sizes = split_sizes(overrides(options))
    if unused := sizes.keys() - {"world_size"}:
        raise ConfigError(f"{min(unused)}: megagrpo doctor reads only world_size; megagrpo plan reads the others")
    path = config_file(options.config)
    return needs_of(load_config(options.config, words), path.stem, gpu, sizes.get("world_size"))


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return the text of the findings, and a last line that counts them."""
    width = max(len(finding.subject) for finding in findings)
    texts = []
    for finding in findings:
        label = "fix: " if finding.state in ("warn", "fail") else ""
        fix = f"; {label}{finding.fix}" if finding.fix or label else ""
        texts += wrapped(f"{finding.state:7}  {finding.subject:{width}}  {finding.result}{fix}", indent=width + 11)
    counts = Counter(finding.state for finding in findings)
    return [*texts, ", ".join(f"{counts[state]} {state}" for state in ("ok", "warn", "fail", "skipped"))]


def exit_code(findings: Sequence[Finding], strict: bool) -> int:
    """Return 2 if a check failed, 1 for a warning with `strict`, else 0."""
    states = {finding.state for finding in findings}
    return 2 if "fail" in states else 1 if strict and "warn" in states else 0
