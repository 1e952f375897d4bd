"""`megagrpo plan CONFIG`: checks a run, and shows memory, time and weight sync of a layout. It imports neither torch nor Megatron.

Exit codes: 0 when the run can start, 2 when it cannot.
"""

from __future__ import annotations

import sys

from megagrpo.config import ConfigError, Problem, ProblemError, RunConfig
from megagrpo.plan import plan, with_times
from megagrpo.plan.gpus import GPUS
from megagrpo.plan.workload import expected_lengths
from megagrpo.process.terminal import show

# key=value arguments that describe the machine and the workload, not the run
SIZES = {"world_size": int, "gpu_memory_gb": float, "link_gb_per_s": float, "prompt_tokens": float, "response_tokens": float}


def split_sizes(arguments: list[str]) -> tuple[list[str], dict[str, float]]:
    """Return (the arguments that replace values of the config, the values of `SIZES`). Raises ConfigError for a size that is not a positive
    number."""
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


def main(
    config: RunConfig,
    world_size: int | None = None,
    gpu_memory_gb: float | None = None,
    link_gb_per_s: float | None = None,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    weight_sync: bool = False,
    gpu: str | None = None,
    search: bool = False,
    json: bool = False,
) -> int:
    """Print the plan and return the exit code.

    Without `world_size` it plans for the smallest number of ranks that fits the layout. With `gpu`, one of `GPUS`, it also predicts
    seconds, for prompts and responses of these average lengths; with `search` also the fastest layouts there. With `weight_sync` it also
    plans one weight sync, which imports the model's code and torch. Raises ConfigError for invalid arguments.
    """
    if gpu is not None and gpu not in GPUS:
        raise ConfigError(f"--gpu: {gpu} is not known; choose one of {', '.join(GPUS)}")
    if gpu is None and (search or prompt_tokens or response_tokens):
        argument = "--search" if search else "prompt_tokens" if prompt_tokens else "response_tokens"
        raise ConfigError(f"{argument}: predicted seconds need a kind of GPU; add --gpu, one of {', '.join(GPUS)}")
    if link_gb_per_s is not None and not weight_sync:
        raise ConfigError("link_gb_per_s: only a plan of a weight sync reads it; add --weight-sync")
    world_size, kind = world_size or config.parallel.smallest_world, None if gpu is None else GPUS[gpu]
    made = plan(config, world_size, gpu_memory_gb or (None if kind is None else kind.memory_gib))
    if kind is not None:
        made = with_times(made, config, world_size, kind, expected_lengths(config, prompt_tokens, response_tokens), search)
    if weight_sync and not made.problems:
        from megagrpo.plan.weight_sync import rows_of

        try:
            links = None
            if kind is not None:
                links = kind.nvlink_gb_per_s if config.rollout.placed == "colocated" else kind.network_gb_per_s
            made.rows.extend([("", ""), *rows_of(config, world_size, link_gb_per_s or links)])
        except ValueError as error:
            made.problems.extend(error.problems if isinstance(error, ProblemError) else [Problem(("--weight-sync",), str(error))])
    show(made.as_json() if json else made, sys.stderr if made.problems and not json else sys.stdout)
    return 2 if made.problems else 0
