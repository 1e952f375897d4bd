"""Makes a run again from the rollouts that it kept, and compares both: every number of each step, and every tensor of
the checkpoints that both have.

    megagrpo replay runs/quickstart
    megagrpo replay runs/quickstart --from 4 --to 6

The new run is RUN/replay. It needs the model, the data and the code that RUN/resolved.yaml names, and no vLLM. With
--generate it generates the responses too, and compares their tokens. On the same kind of CPU both runs are equal to the
bit; on GPUs with run.deterministic.

Exit codes: 0 when both are equal, 1 when they differ or the replay failed, 2 for a run that cannot be replayed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megagrpo.commands.arguments.config_arguments import overrides
from megagrpo.config import ConfigError
from megagrpo.platform.process.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo replay`."""
    add = parser.add_argument
    add("run_folder", metavar="RUN", help="folder of a run")
    add("overrides", nargs="*", default=[], metavar="key=value", help="value of the run's config to replace")
    add("--from", dest="first", type=int, metavar="STEP", help="begin with the run's checkpoint after this step")
    add("--to", dest="last", type=int, metavar="STEP", help="end after this step")
    add("--generate", action="store_true", help="generate the responses again, with vLLM")


def run(options: argparse.Namespace) -> int:
    """Replay, compare, and return the exit code. Raises ConfigError for a folder that cannot be replayed."""
    from megagrpo.commands.api.train_call import run_training
    from megagrpo.proof.replays import REPLAY_FOLDER, compare, prepare
    from megagrpo.records.checkpoints.run_files import RESOLVED

    folder = Path(options.run_folder)
    if options.generate and options.last is not None:
        raise ConfigError("--to: a replay that generates ends with its run; leave --to or --generate out")
    replaced, ranks = prepare(folder, options.first, options.last, options.generate)
    if run_training(str(folder / RESOLVED), [*replaced, *overrides(options)], ranks):
        return 1
    lines, differ = compare(folder, folder / REPLAY_FOLDER, options.first or 0)
    show("\n".join(lines))
    return int(differ)
