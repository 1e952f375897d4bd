#!/usr/bin/env python3
"""Writes the job of a config for a cluster, and optionally submits it.

    megagrpo submit CONFIG [key=value ...] --cluster configs/clusters/x.yaml [--resume] [--sbatch option=value ...]
                     [--submit | --kubernetes]

Prints an sbatch script, or with --kubernetes the manifest of a JobSet; --submit passes the script to sbatch instead. Needs pydantic and
PyYAML, but neither torch nor a GPU; a python3 without these packages re-executes with the repository's .venv. Exit code 2: config,
cluster or command line is invalid, and nothing was submitted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN_PYTHON = ROOT / ".venv" / "bin" / "python"
sys.path.insert(0, str(ROOT))

try:
    from megagrpo.launch.job import load_cluster, place
    from megagrpo.launch.kubernetes import manifest
    from megagrpo.launch.slurm import sbatch_script
    from megagrpo.config import ConfigError, RunConfig, load_config
    from megagrpo.plan import plan
    from megagrpo.plan.shapes import UnseenModel
    from megagrpo.process.terminal import warn
except (ModuleNotFoundError, SyntaxError) as error:  # this python3 is too old or lacks the packages
    if Path(sys.prefix) == OWN_PYTHON.parents[1]:
        raise
    if OWN_PYTHON.exists():
        os.execv(OWN_PYTHON, [str(OWN_PYTHON), *sys.argv])
    print(f"{sys.executable}: needs Python 3.12 with pydantic and PyYAML, as launch/setup.sh installs them: {error}", file=sys.stderr)
    raise SystemExit(2) from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("--sbatch", action="append", default=[], metavar="option=value", help="for example --sbatch dependency=singleton")
    to = parser.add_mutually_exclusive_group()
    to.add_argument("--submit", action="store_true", help="pass the script to sbatch")
    to.add_argument("--kubernetes", action="store_true", help="print the manifest of a JobSet")
    options = parser.parse_intermixed_args(arguments)
    overrides = [*options.overrides, *["run.resume=true"] * options.resume]
    try:
        cluster = load_cluster(options.cluster)
        cluster.sbatch.update({name: value or True for name, _, value in (option.partition("=") for option in options.sbatch)})
        config = load_config(options.config, overrides)
        placement = place(config, cluster)
        check_plan(config, placement.world_size, cluster.gpu_memory_gb if cluster.gpus_per_node else None)
        render = manifest if options.kubernetes else sbatch_script
        text = render(config, options.config, overrides, cluster, placement)
    except ConfigError as error:
        warn(error)
        return 2
    if not options.submit:
        print(text, end="")
        return 0
    try:
        return subprocess.run(["sbatch"], input=text, text=True).returncode
    except FileNotFoundError:
        print("sbatch: command not found; run --submit on a host with Slurm's commands", file=sys.stderr)
        return 2


def check_plan(config: RunConfig, world_size: int, gpu_memory_gb: float | None) -> None:
    """Raise ConfigError when the run cannot start. A model that this host cannot see only gives a warning; the job's plan checks it."""
    try:
        problems = plan(config, world_size, gpu_memory_gb).problems
    except ModuleNotFoundError as error:  # models from the hub or a package need more packages than this script
        problems = [UnseenModel(("model.path",), f"{config.model.path} needs {error.name}, which is not installed on this host")]
    unseen = [problem for problem in problems if isinstance(problem, UnseenModel)]
    for problem in unseen:
        warn(f"not checked on this host: {problem}")
    if problems != unseen:
        raise ConfigError("\n".join(str(problem) for problem in problems if problem not in unseen))


if __name__ == "__main__":
    raise SystemExit(main())
