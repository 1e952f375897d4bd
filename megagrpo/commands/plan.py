"""Checks a run, and predicts memory and time of a layout. Needs neither a GPU nor torch.

    megagrpo plan megagrpo:qwen2.5_7b_1node world_size=8 gpu_memory_gb=80
    megagrpo plan my_run.yaml --gpu h100 response_tokens=800
    megagrpo plan my_run.yaml --gpu h100 --search

Besides keys of the config, key=value may be world_size (ranks; default: as few as the layout needs, with --gpu those of
run.nodes nodes with 8 GPUs each) and gpu_memory_gb; with --gpu also prompt_tokens and response_tokens, the average
lengths. Exit code 0: the run can start, 2: it cannot.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megagrpo.commands.api.plan_call import layouts, plan
from megagrpo.commands.arguments.config_arguments import add_config, overrides
from megagrpo.config import ConfigError
from megagrpo.platform.process.terminal import show

# key=value arguments that describe the machine and the workload, not the run
SIZES = {
    "world_size": int,
    "gpu_memory_gb": float,
    "prompt_tokens": float,
    "response_tokens": float,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo plan`."""
    add = parser.add_argument
    add_config(parser)
    add("--gpu", metavar="KIND", help="predict seconds for this kind of GPU: h100, h200, b200 or a100")
    add("--search", action="store_true", help="with --gpu: print the fastest layouts as keys to set")
    add("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the plan, and return the exit code. Raises ConfigError for a wrong config or option."""
    words, sizes = split_sizes(overrides(options))
    if options.search:
        for line in layouts(options.config, words, sizes, options.gpu):
            show(line)
        return 0
    made = plan(options.config, gpu=options.gpu, overrides=words, **sizes)
    show(made.as_json() if options.json else made, sys.stderr if made.problems and not options.json else sys.stdout)
    return 2 if made.problems else 0


def split_sizes(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return (the arguments that replace values of the config, the values of `SIZES`). Raises ConfigError for a size
    that is not a positive number."""
    overrides, sizes = [], {}
    for argument in arguments:
        name, _, text = argument.partition("=")
        if name not in SIZES:
            overrides.append(argument)
            continue
        try:
            sizes[name] = SIZES[name](text)
        except ValueError:
            sizes[name] = 0
        if not sizes[name] > 0:
            raise ConfigError(f"{name}: must be a positive number (got {text!r})")
    return overrides, sizes
