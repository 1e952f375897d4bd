"""The train step that `megagrpo plan` predicts, counted operation by operation without a GPU.

    python benchmarks/plan_trace.py megagrpo:qwen2.5_7b_1node world_size=8 --gpu h100

It runs the train step of one rank: the real policy, loss, DDP and optimizer, of the whole model, on floating-point
tensors without data (`benchmarks/tracing/`). It prints FLOPs, bytes, kernel launches, waits of the host and the memory
peak by phase, with `--gpu` also seconds and MFU. key=value are those of `megagrpo plan`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by its path, this file sees only its own folder

from benchmarks.tracing.traced_step import rows_of
from megagrpo.commands.api.plan_call import plan, planned_ranks
from megagrpo.commands.plan import split_sizes
from megagrpo.config import ConfigError, load_config
from megagrpo.planner.costs.gpu_specs import GPUS
from megagrpo.planner.costs.workload import expected_lengths
from megagrpo.platform.process.terminal import wrapped


def main() -> None:
    """Print the rows of the trace. Exits with 2 when config or plan have problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file, or megagrpo:NAME")
    parser.add_argument("values", nargs="*", metavar="key=value", help="values of the config, and sizes")
    parser.add_argument("--gpu", choices=GPUS, help="also print seconds and MFU on this kind of GPU")
    options = parser.parse_intermixed_args()
    try:
        words, sizes = split_sizes(options.values)
        made = plan(options.config, gpu=options.gpu, overrides=words, **sizes)
        if made.problems or made.model is None:
            raise ConfigError(str(made))
        config = load_config(options.config, words)
        lengths = expected_lengths(config, sizes.get("prompt_tokens"), sizes.get("response_tokens"))
        gpu = None if options.gpu is None else GPUS[options.gpu]
        ranks, _ = planned_ranks(config, sizes.get("world_size"), options.gpu)
        rows = rows_of(config, made.model, ranks, gpu, lengths)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    for name, text in rows:
        print("\n".join(wrapped(f"{name:<10}{text}", indent=10)))


if __name__ == "__main__":
    main()
