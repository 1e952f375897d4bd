"""Checks a run, and predicts memory, time and weight syncs of a layout. Needs neither a GPU nor torch.

    megagrpo plan megagrpo:qwen2.5_7b_1node world_size=8 gpu_memory_gb=80
    megagrpo plan my_run.yaml --gpu h100 --search
    megagrpo plan my_run.yaml --weight-sync link_gb_per_s=50
    megagrpo plan my_run.yaml --gpu h100 --trace

Besides keys of the config, key=value may be world_size (ranks; default: as few as the layout needs) and gpu_memory_gb;
with --gpu also prompt_tokens and response_tokens, the average lengths; with --weight-sync also link_gb_per_s. Exit code
0: the run can start, 2: it cannot.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megagrpo.commands.config_arguments import add_config, overrides
from megagrpo.config import ConfigError, Problem, ProblemError, RunConfig, load_config
from megagrpo.platform.process.terminal import show

# key=value arguments that describe the machine and the workload, not the run
SIZES = {
    "world_size": int,
    "gpu_memory_gb": float,
    "link_gb_per_s": float,
    "prompt_tokens": float,
    "response_tokens": float,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo plan`."""
    add_config(parser)
    parser.add_argument("--gpu", metavar="KIND", help="predict seconds for this kind of GPU: h100, h200, b200 or a100")
    parser.add_argument("--search", action="store_true", help="with --gpu: also list the fastest layouts")
    parser.add_argument(
        "--weight-sync",
        action="store_true",
        help="also plan what a weight sync moves between which ranks; imports torch",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="also count FLOPs, bytes, launches and memory of the real step; imports torch",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the plan, and return the exit code. Raises ConfigError for a wrong config or option."""
    words, sizes = split_sizes(overrides(options))
    config = load_config(options.config, words)
    return print_plan(config, options.gpu, options.search, options.weight_sync, options.json, options.trace, **sizes)


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


def print_plan(
    config: RunConfig,
    gpu: str | None = None,
    search: bool = False,
    weight_sync: bool = False,
    json: bool = False,
    trace: bool = False,
    *,
    world_size: int | None = None,
    gpu_memory_gb: float | None = None,
    link_gb_per_s: float | None = None,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
) -> int:
    """Print the plan and return the exit code.

    Without `world_size` it plans for the smallest number of ranks that fits the layout. With `gpu`, one of `GPUS`, it
    also predicts seconds, for prompts and responses of these average lengths; with `search` also the fastest layouts
    there. With `weight_sync` it also plans one weight sync, which imports the model's code and torch. With `trace` it
    also runs the train step on tensors without data. Raises ConfigError for invalid arguments.
    """
    from megagrpo.proof.plan import plan, with_times
    from megagrpo.proof.plan.gpu_specs import GPUS
    from megagrpo.proof.plan.workload import expected_lengths

    if gpu is not None and gpu not in GPUS:
        raise ConfigError(f"--gpu: {gpu} is not known; choose one of {', '.join(GPUS)}")
    if gpu is None and (search or prompt_tokens or response_tokens):
        argument = "--search" if search else "prompt_tokens" if prompt_tokens else "response_tokens"
        raise ConfigError(f"{argument}: predicted seconds need a kind of GPU; add --gpu, one of {', '.join(GPUS)}")
    limits = {
        "prompt_tokens": (prompt_tokens, config.rollout.max_prompt_length),
        "response_tokens": (response_tokens, config.max_response_length),
    }
    for argument, (average, limit) in limits.items():
        if average is not None and average > limit:
            raise ConfigError(
                f"{argument}: {average:g} is above the longest that the config allows, {limit}; lower it, or raise the "
                f"limit"
            )
    if link_gb_per_s is not None and not weight_sync:
        raise ConfigError("link_gb_per_s: only a plan of a weight sync reads it; add --weight-sync")
    world_size, kind = world_size or config.parallel.smallest_world, None if gpu is None else GPUS[gpu]
    made = plan(config, world_size, gpu_memory_gb or (None if kind is None else kind.memory_gib))
    if kind is not None:
        made = with_times(
            made, config, world_size, kind, expected_lengths(config, prompt_tokens, response_tokens), search
        )
    if weight_sync and not made.problems:
        from megagrpo.proof.plan.weight_sync import rows_of

        try:
            links = None
            if kind is not None:
                links = kind.nvlink_gb_per_s if config.rollout.placed == "colocated" else kind.network_gb_per_s
            made.rows.extend([("", ""), *rows_of(config, world_size, link_gb_per_s or links)])
        except ValueError as error:
            made.problems.extend(
                error.problems if isinstance(error, ProblemError) else [Problem(("--weight-sync",), str(error))]
            )
    if trace and not made.problems and made.model is not None:
        from megagrpo.proof.plan.tracing.traced_step import rows_of as traced

        lengths = expected_lengths(config, prompt_tokens, response_tokens)
        made.rows.extend([("", ""), *traced(config, made.model, world_size, kind, lengths)])
    show(made.as_json() if json else made, sys.stderr if made.problems and not json else sys.stdout)
    return 2 if made.problems else 0
