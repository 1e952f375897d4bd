"""Training: `run_training` is `megagrpo train`, and `megagrpo.train` calls it in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megagrpo.commands.api import child_process
from megagrpo.commands.api.inputs.call_inputs import Reward, collect, from_python_folder
from megagrpo.commands.api.inputs.config_input import ConfigLike, Overrides, read
from megagrpo.commands.api.inputs.dataset_rows import Rows
from megagrpo.commands.api.inputs.errors import CommandFailed, TrainingFailed
from megagrpo.commands.api.run_handle import Run
from megagrpo.config import ConfigError, RunConfig, load_config
from megagrpo.config.io import config_file
from megagrpo.platform.process.environment import launched
from megagrpo.platform.process.imports import one_metadata_scan, without_garbage_collection
from megagrpo.platform.process.terminal import show, warn
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.records.checkpoints.run_files import FROM_PYTHON
from megagrpo.trainer.saving.time_limit import TO_BE_CONTINUED, end_of_run

TRAIN_LOG = "train.log"


def train(
    config: ConfigLike,
    *,
    reward_functions: Reward | Sequence[Reward] | None = None,
    dataset: Rows | None = None,
    eval_dataset: Rows | Mapping[str, Rows] | None = None,
    callbacks: Sequence[Any] | None = None,
    overrides: Overrides = (),
    resume: bool = False,
    ranks: int | None = None,
    quiet: bool = False,
) -> Run:
    """Train with GRPO on this machine and return the finished run.

    The run's processes are those of `megagrpo train`: this process holds no model and no GPU memory. Their output
    appears here. Ctrl-C, or the stop button of a notebook, lets the run finish its step, save and stop; then
    KeyboardInterrupt is raised.

    Args:
        config: A YAML file, a shipped config such as `megagrpo:quickstart`, a mapping of sections as in YAML, or a
            RunConfig. Relative paths in a mapping are relative to the current folder.
        reward_functions: Replaces `rewards.functions`. Each is a function, a name such as `accuracy` or
            `file.py:function`, or a mapping of `function` and other keys of `rewards.functions.N` such as `weight`,
            `timeout` and `args`. A function gets `prompts`, `completions` and the columns of the data as keywords
            (docs/rewards.md), and returns one number or None per completion. It runs in worker processes with a time
            limit: changes of its global variables do not come back.
        dataset: Replaces `data.train`: a `datasets.Dataset`, a `pandas.DataFrame`, an Arrow table, a list of dicts, or
            the name of a source. It is written into the run's folder.
        eval_dataset: Replaces `data.eval`; a mapping of names to data sets goes to `evaluation.sets`.
        callbacks: More `run.callbacks`: classes, objects, or names as `file.py:Class`. They run in the process of rank
            0.
        overrides: Values by dotted key, `{"train.learning_rate": 1e-5}`, or texts as on the command line.
        resume: Continue the run from its newest checkpoint (`run.resume`).
        ranks: Processes to train with; otherwise one per GPU, or on a CPU as few as `parallel` needs.
        quiet: Do not show the run's output. The file `from_python/train.log` in the run's folder always holds all of
            it.

    Returns:
        The run: `run.metrics`, `run.checkpoint`, `run.generate(...)`.

    Raises:
        ConfigError: The config, an argument, the data or a reward function is wrong. `problems` lists the keys that are
            known.
        TrainingFailed: The run ended with an error. It names the run's folder and the log.
    """
    _check_caller(ranks)
    settings = read(config, overrides)
    inputs = collect(reward_functions, dataset, eval_dataset, callbacks)
    resumed = ["run.resume=true"] if resume else []
    validated = settings.validated([*resumed, *inputs.overrides(Path(FROM_PYTHON))])
    inputs.check_rows(validated)
    folder = (Path(validated.run.output_dir) / validated.run.name).absolute()
    written = inputs.write(folder) if inputs.to_write else folder
    more = [*resumed, *inputs.overrides(written, validated.run.callbacks)]
    planned_ranks(settings.validated(more), ranks)
    _start(settings.words(lambda: from_python_folder(folder), more), ranks, folder, quiet)
    return Run(folder)


def _check_caller(ranks: Any) -> None:
    """Raise ConfigError in a process that is itself a rank, and for a number of ranks that is none."""
    if launched(ENVIRONMENT):
        raise ConfigError(
            "megagrpo.train: starts the ranks itself; call it in one process, not under torchrun, and set ranks=N"
        )
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise ConfigError(f"ranks: must be a positive number (got {ranks!r})")


def _start(words: list[str], ranks: int | None, folder: Path, quiet: bool) -> None:
    """Train in a new process, with a config and overrides, and wait for its end. Raises TrainingFailed."""
    log = from_python_folder(folder) / TRAIN_LOG
    name, *overrides = words
    try:
        with log.open("a", encoding="utf-8") as file:
            show(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} megagrpo train {' '.join(words)}", file)
        child_process.call("megagrpo train", run_training, name, overrides, ranks, log=log, quiet=quiet)
    except KeyboardInterrupt:
        warn(f"stopped; megagrpo.load_run({str(folder)!r}) opens the run, and resume=True continues it")
        raise
    except CommandFailed as error:
        if error.exit_code != TO_BE_CONTINUED:
            raise TrainingFailed(error.command, error.exit_code, error.output, folder, log) from None


def run_training(name: str, overrides: Sequence[str], ranks: int | None = None) -> int:
    """Train in this process, or in ranks that it starts, and return the exit code.

    `name` is a YAML file or a shipped config. Under a launcher this process is one rank; else it starts `ranks`, by
    default as many as `planned_ranks` returns. Raises ConfigError for a config that cannot run here.
    """
    config = load_config(name, overrides)
    end_of_run(config.run.time_limit)
    is_rank = launched(ENVIRONMENT)
    if not is_rank:
        from megagrpo.cluster.launch.local import num_gpus, run_ranks, set_cuda_max_connections, set_thread_environment
        from megagrpo.engine.servers import early_start

        ranks = planned_ranks(config, ranks)
        set_thread_environment(ranks)
        set_cuda_max_connections(config)
        if ranks > 1:
            return run_ranks(ranks, ["megagrpo", "train", name, *overrides])
    with without_garbage_collection(), one_metadata_scan():
        if not is_rank and not num_gpus() and config.generates:
            early_start.begin(config.rollout, config.lora.rank if config.lora.syncs_adapters else 0)
        from megagrpo.trainer import rank
        from megagrpo.trainer.methods.method_table import BUILDERS
    build = BUILDERS[config.algorithm.loss.method]
    with rank.exit_code() as ended, rank.make_trainer(config, config_file(name).parent, ended, build) as trainer:
        ended.stopped_by = trainer.run()
    return ended.code


def planned_ranks(config: RunConfig, ranks: int | None = None) -> int:
    """Return the number of ranks to start on this machine: `ranks`, else what NPROC, the GPUs or the layout say. Raises
    ConfigError with the problems of the plan, before any process starts."""
    from megagrpo.cluster.launch.local import num_ranks
    from megagrpo.planner.rules.plan_problems import require

    if config.run.nodes > 1:
        reason = f"run.nodes: {config.run.nodes} nodes, but megagrpo train starts the ranks of one"
        raise ConfigError(f"{reason}; use megagrpo submit, or set run.nodes=1")
    ranks = ranks or num_ranks(config.rollout, config.parallel)
    require(config, ranks)
    return ranks
