"""`megagrpo.evaluate`, which is also `megagrpo eval`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.commands.api import child_process
from megagrpo.commands.api.inputs.call_inputs import Reward, collect
from megagrpo.commands.api.inputs.config_input import ConfigLike, Overrides, read
from megagrpo.commands.api.inputs.dataset_rows import Rows
from megagrpo.commands.api.inputs.tables import flat_rewards, table
from megagrpo.config import RunConfig
from megagrpo.config.io import config_file
from megagrpo.platform.process.cleanup.removal import temporary_folder
from megagrpo.platform.process.imports import without_garbage_collection

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Evaluation:
    """The result of `megagrpo.evaluate`.

    Attributes:
        metrics: Metric -> value, as in a run but without `eval/`: `reward`, `pass@1`; of a named set `NAME/reward`.
        by_set: Name of a set, empty for `data.eval` -> its responses, as `megagrpo eval --output` writes them.
    """

    metrics: dict[str, float]
    by_set: dict[str, list[dict[str, Any]]]

    @property
    def responses(self) -> pandas.DataFrame:
        """One row per response: `set` ("": `data.eval`), `prompt`, `completion`, `reward`, `rewards/NAME` and more."""
        return table({"set": name} | flat_rewards(row) for name, rows in self.by_set.items() for row in rows)


def evaluate(
    config: ConfigLike,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    eval_dataset: Rows | Mapping[str, Rows] | None = None,
    reward_functions: Reward | Sequence[Reward] | None = None,
    overrides: Overrides = (),
) -> Evaluation:
    """Evaluate held-out prompts with vLLM alone: `data.eval` and `evaluation.sets`, as a run does (docs/evaluation.md).

    Args:
        config: The config, as for `megagrpo.train`; for a run that has ended, `run.config`.
        checkpoint: `latest` or `best` of the run that the config names, a checkpoint, or a Hugging Face folder. None:
            the model before training.
        adapter: A LoRA adapter as PEFT saves it.
        eval_dataset: Replaces `data.eval`; a mapping of names to data sets goes to `evaluation.sets`.
        reward_functions: Replaces `rewards.functions`, as for `megagrpo.train`.
        overrides: Values by dotted key, or texts as on the command line.

    Raises:
        ConfigError: The config or an argument is wrong, or there is nothing to evaluate.
        CommandFailed: vLLM failed.
    """
    settings = read(config, overrides)
    inputs = collect(reward_functions, None, eval_dataset, None)
    weights = [None if name is None else os.fspath(name) for name in (checkpoint, adapter)]
    with temporary_folder("megagrpo_evaluate_") as folder:
        inputs.check_rows(settings.validated(inputs.overrides(folder)))
        validated = settings.validated(inputs.overrides(inputs.write(folder) if inputs.to_write else folder))
        base = Path() if settings.file is None else config_file(settings.file).parent
        made: Evaluation = child_process.call("megagrpo eval", evaluate_here, validated, base.absolute(), *weights)
    return made


def evaluate_here(config: RunConfig, base_folder: Path, checkpoint: str | None, adapter: str | None) -> Evaluation:
    """Evaluate in this process; `base_folder` is the folder of the config's file. Raises ConfigError, and SystemExit
    with the exit code when vLLM fails or a signal comes."""
    with without_garbage_collection():
        from megagrpo.engine.servers.serving import with_servers
        from megagrpo.trainer.evaluation.offline import evaluate_offline

    def command() -> Evaluation:
        with ExitStack() as resources:
            return Evaluation(*evaluate_offline(config, base_folder, checkpoint, adapter, resources))

    return with_servers(command, "evaluation")
