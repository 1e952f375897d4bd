"""`megagrpo.plan`, `megagrpo.verify` and `megagrpo.evaluate`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.commands.api import child_process
from megagrpo.commands.api.config_input import ConfigLike, Overrides, read
from megagrpo.commands.api.dataset_rows import Rows
from megagrpo.commands.api.errors import CommandFailed
from megagrpo.commands.api.inputs import Reward, collect
from megagrpo.commands.api.tables import flat_rewards, table
from megagrpo.config import ConfigError
from megagrpo.platform.process.removal import temporary_folder

if TYPE_CHECKING:
    import pandas

    from megagrpo.proof.plan import Plan


@dataclass(frozen=True)
class Verification:
    """The result of `megagrpo.verify`.

    Attributes:
        passed: Whether every layout computes what one process computes.
        layouts: Per layout a dict: `layout`, `ranks`, `passed`, `failure` (a text, or None), `seconds`, `worst`
            (quantity -> its largest difference and tolerance) and `distances`, every quantity.
    """

    passed: bool
    layouts: list[dict[str, Any]]

    @property
    def table(self) -> pandas.DataFrame:
        """One row per layout: `layout`, `ranks`, `passed`, `seconds`, `failure`, and the error of each quantity's worst
        tensor."""
        kept = ("layout", "ranks", "passed", "seconds", "failure")
        return table(
            {name: row[name] for name in kept} | {kind: worst["error"] for kind, worst in (row["worst"] or {}).items()}
            for row in self.layouts
        )


@dataclass(frozen=True)
class Evaluation:
    """The result of `megagrpo.evaluate`.

    Attributes:
        metrics: Metric -> value, as in a run but without `eval/`: `reward`, `pass@1`; of a named set `NAME/reward`.
        responses: One row per response: `set` (empty for `data.eval`), `prompt`, `completion`, `reward`, `rewards/NAME`
            and more.
    """

    metrics: dict[str, float]
    responses: pandas.DataFrame


def plan(
    config: ConfigLike,
    *,
    world_size: int | None = None,
    gpu: str | None = None,
    gpu_memory_gb: float | None = None,
    search: bool = False,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    overrides: Overrides = (),
) -> Plan:
    """Check a run and predict its memory and time, without GPUs, weights or torch.

    Args:
        config: The config, as for `megagrpo.train`.
        world_size: Ranks of the trainer; as few as the layout needs when left out.
        gpu: A kind of GPU, `h100`, `h200`, `b200` or `a100`, to predict seconds and memory for.
        gpu_memory_gb: Memory of a GPU in GiB; that of `gpu` when left out.
        search: With `gpu`, also find the fastest layouts.
        prompt_tokens: With `gpu`, average length of a prompt.
        response_tokens: With `gpu`, average length of a response.
        overrides: Values by dotted key, or texts as on the command line.

    Returns:
        The plan. `str(plan)` is what `megagrpo plan` prints. `problems` is empty when the run can start; `memory` is
        phase -> part -> GiB; `times` holds seconds, with `gpu`; `found` the layouts of `search`.

    Raises:
        ConfigError: The config or an argument is wrong. A layout that does not fit is no error: `problems` names it.
    """
    from megagrpo.proof.plan import plan as make_plan
    from megagrpo.proof.plan import with_times
    from megagrpo.proof.plan.gpu_specs import GPUS
    from megagrpo.proof.plan.workload import expected_lengths

    numbers = dict(
        world_size=world_size, gpu_memory_gb=gpu_memory_gb, prompt_tokens=prompt_tokens, response_tokens=response_tokens
    )
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name}: must be a positive number (got {value!r})")
    if gpu is not None and gpu not in GPUS:
        raise ConfigError(f"gpu: {gpu} is not known; choose one of {', '.join(GPUS)}")
    if gpu is None and (search or prompt_tokens or response_tokens):
        name = "search" if search else "prompt_tokens" if prompt_tokens else "response_tokens"
        raise ConfigError(f"{name}: predicted seconds need a kind of GPU; add gpu, one of {', '.join(GPUS)}")
    validated, kind = read(config, overrides).validated(), None if gpu is None else GPUS[gpu]
    ranks = world_size or validated.parallel.smallest_world
    made = make_plan(validated, ranks, gpu_memory_gb or (None if kind is None else kind.memory_gib))
    if kind is None:
        return made
    return with_times(made, validated, ranks, kind, expected_lengths(validated, prompt_tokens, response_tokens), search)


def verify(
    config: ConfigLike,
    layouts: Sequence[str | Mapping[str, Any]] = (),
    *,
    ranks: int | None = None,
    overrides: Overrides = (),
) -> Verification:
    """Take one step of a small copy of the run in each layout, and compare every gradient with one process's
    (docs/verify.md).

    Args:
        config: The config, as for `megagrpo.train`.
        layouts: Layouts as texts, `"tp=2,pp=2,dp=2"`, or mappings, `{"tp": 2, "dp": 2}`; the config's own when left
            out.
        ranks: Number of ranks of a layout that does not say `dp`.
        overrides: Values by dotted key, or texts as on the command line.

    Raises:
        ConfigError: A layout cannot be tried.
        CommandFailed: The verification itself failed.
    """
    settings, texts = read(config, overrides), [_layout_text(layout) for layout in layouts]
    options = [word for text in texts for word in ("--layout", text)] + (
        [] if ranks is None else ["--ranks", str(ranks)]
    )
    with temporary_folder("megagrpo_verify_") as folder:
        ended = child_process.run(child_process.MAIN, ["verify", *settings.words(lambda: folder), *options, "--json"])
    try:
        result = json.loads(ended.out)
    except ValueError:
        raise CommandFailed("megagrpo verify", ended.exit_code, ended.output) from None
    return Verification(result["passed"], result["layouts"])


def _layout_text(layout: str | Mapping[str, Any]) -> str:
    """Return a layout in the form of `megagrpo verify --layout`."""
    if isinstance(layout, str):
        return layout
    return ",".join(key if value is True else f"{key}={value}" for key, value in layout.items() if value is not False)


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
    with temporary_folder("megagrpo_evaluate_") as folder:
        inputs.check_rows(settings.validated(inputs.overrides(folder)))
        more = inputs.overrides(inputs.write(folder) if inputs.to_write else folder)
        options = [] if checkpoint is None else ["--checkpoint", os.fspath(checkpoint)]
        options += [] if adapter is None else ["--adapter", os.fspath(adapter)]
        output = Path(folder, "evaluation.json")
        words = ["eval", *settings.words(lambda: folder, more), *options, "--output", str(output)]
        ended = child_process.run(child_process.MAIN, words)
        if ended.exit_code:
            raise CommandFailed("megagrpo eval", ended.exit_code, ended.output)
        written = json.loads(output.read_text())
    rows = [{"set": name} | flat_rewards(row) for name, responses in written["responses"].items() for row in responses]
    return Evaluation(written["metrics"], table(rows))
