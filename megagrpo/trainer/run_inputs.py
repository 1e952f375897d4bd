"""What a run reads and checks before it starts servers or loads weights: servers, the user's code, model, data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch

from megagrpo.algorithms.custom_advantage import load_estimator
from megagrpo.config import AlgorithmSection, DataSection, DatasetSection, RunConfig, RunSection, Task
from megagrpo.data.images.prompt_images import IMAGE_COLUMNS
from megagrpo.data.prompts import PromptSource, prompt_reader
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.data.sources.task_mixture import Mixture
from megagrpo.data.tokens.request_trial import shared_trial
from megagrpo.data.tokens.row_settings import RowReader
from megagrpo.data.tokens.sampling import sampling_of
from megagrpo.data.tokens.tokenizer import Tokenizer, load_tokenizer
from megagrpo.environments.dialogues import Dialogues, make_dialogues
from megagrpo.families.hf_config import HfConfig, architecture_differences, load_hf_config
from megagrpo.families.weight_sources import resolve_model
from megagrpo.platform import device
from megagrpo.platform.parallel.agree import RankError, on_first_rank, run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.variables import ENVIRONMENT, TOKEN_VARIABLE
from megagrpo.policy.device_checks import check_device
from megagrpo.policy.images.trained_tower import train_tower
from megagrpo.records.profile import check_profile
from megagrpo.records.sinks.find_trackers import check_trackers, unused_options
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.train_types import LossFn
from megagrpo.trainer.callbacks import Callbacks, load_callbacks
from megagrpo.trainer.data_checks.reward_trial import SECONDS_AT_START, start_warnings
from megagrpo.trainer.engine_side import NamedServers, check_servers
from megagrpo.trainer.evaluation.sets import HeldOut, check_columns, load_sets
from megagrpo.trainer.rollout.sourced_prompts import SourcedPrompts
from megagrpo.trainer.saving.data_change import DataChange, data_change
from megagrpo.trainer.saving.run_folder import RunFolder, open_run_folder
from megagrpo.trainer.teachers import TeacherFiles, model_files, teacher_files
from megagrpo.types import SamplingParams
from megagrpo.weights.bridge.image_facts import processor_of
from megagrpo.weights.bridge.load import Checkpoint


@dataclass(frozen=True)
class ModelFiles:
    """The Hugging Face folders of the policy, its teachers and, with `model.reference_path`, its reference. `dtype` is
    the dtype in which the policy computes."""

    folder: Path
    hf_config: HfConfig
    dtype: torch.dtype
    reference_folder: Path | None
    teachers: list[TeacherFiles | None]
    critic: TeacherFiles | None = None  # with `algorithm.critic.path`


@dataclass(frozen=True)
class Data:
    """Prompts, held-out sets and rewards. `tokenizer`, `dialogues` and `rewards` are None except on the leader rank of
    each replica; the `dialogues` of a task also without `multi_turn`. On other ranks prompts have no content."""

    tokenizer: Tokenizer | None
    sampling: SamplingParams  # of the run
    prompts: PromptOrder
    held_out: list[HeldOut]
    dialogues: dict[str, Dialogues | None]  # of each task by its name
    rewards: RewardScorer | None
    held_rows: dict[str, PromptOrder] = field(default_factory=dict)  # of a run on rows: its sets by name


ReadData = Callable[
    [RunConfig, Path, tuple[Tokenizer | None, Tokenizer | None], int, Layout, ExitStack], tuple[RunConfig, Data]
]


@dataclass(frozen=True)
class Inputs:
    """All inputs of a run. `config` has `run.max_steps` set if the data decided it; `notes` are lines for the user."""

    config: RunConfig
    servers: NamedServers
    loss_fn: LossFn
    callbacks: Callbacks
    model: ModelFiles
    folder: RunFolder
    data: Data
    notes: list[str]
    data_change: DataChange | None  # of `data.train` since the checkpoint that the run resumes from


def read_inputs(
    config: RunConfig,
    base_folder: Path,
    layout: Layout,
    resources: ExitStack,
    loss_of: Callable[[AlgorithmSection], LossFn],
    read_data: ReadData | None = None,
) -> Inputs:
    """Read and check inputs, lock the run's folder. `loss_of` and `read_data` are the method's; without the
    second the data are prompts.
    Collective. Raises ValueError with an invalid input's key."""
    first = layout.world_rank == 0
    servers = on_first_rank(layout, lambda: check_servers(config))
    ENVIRONMENT.pop(TOKEN_VARIABLE, None)  # reward functions must not see the token
    loss_fn = run_own_and_agree(layout, lambda: loss_of(config.algorithm))
    if config.algorithm.own_estimator:
        run_own_and_agree(layout, lambda: load_estimator(config.algorithm))
    callbacks = run_own_and_agree(layout, lambda: load_callbacks(config.run.callbacks) if first else None)
    on_first_rank(layout, lambda: check_trackers(config.run.trackers))
    check_profile(config.run.profile, device.has_gpu())
    model_folder = resolve_model(config.model.path)
    hf_config = load_hf_config(model_folder)
    if not config.model.freeze_vision_tower:
        hf_config = train_tower(hf_config)
    dtype = run_own_and_agree(layout, lambda: check_device(config, hf_config))
    on_first_rank(layout, lambda: Checkpoint(model_folder).check_all(hf_config))
    folder = open_run_folder(config, layout, resources)
    # all ranks compute positions of images, and those of the first pipeline stage their pixels
    reads = layout.is_dp_leader or config.data.images
    reader = run_own_and_agree(layout, lambda: processor_of(config, model_folder, hf_config) if reads else None)
    tokenizer = reader if layout.is_dp_leader else None
    reference_folder = run_own_and_agree(
        layout, lambda: _reference_folder(config.model.reference_path, hf_config, tokenizer)
    )
    named = config.algorithm.teacher
    teachers = run_own_and_agree(
        layout, lambda: teacher_files(named, hf_config, layout, tokenizer, config.longest_sequence)
    )
    key, path = "algorithm.critic.path", config.algorithm.critic.path
    of_critic = (lambda: model_files(key, path, hf_config, layout, tokenizer, True)) if path else lambda: None
    critic = run_own_and_agree(layout, of_critic)
    model = ModelFiles(model_folder, hf_config, dtype, reference_folder, teachers, critic)
    tokenizers = tokenizer, reader
    of_model = tokenizers, hf_config.vocab_size, layout, resources
    given, (config, data) = config, (read_data or _read_data)(config, base_folder, *of_model)
    if hf_config.vision and not config.data.images and (unread := {*IMAGE_COLUMNS} & {*data.prompts.columns}):
        raise ValueError(f"data.images: data.train has the column {min(unread)}; set it to true, or rename the column")
    per_step = config.rollout.prompts_per_step
    notes = [*_steps_notes(given.run, config.run, per_step, len(data.prompts)), *unused_options(config.run)]
    if first and tokenizer:
        notes += _start_warnings(config.each_task, data, tokenizer)
    if change := data_change(data.prompts, folder.resume_from, config.run.resume, layout):
        notes.append(change.note)
    if isinstance(data.prompts, Mixture):
        data.prompts.sourced(
            lambda task, order, first: SourcedPrompts(order, layout, task.config, task.key("data.source"), first)
        )
    elif config.data.source is not None:
        data = replace(data, prompts=SourcedPrompts(data.prompts, layout, config))
    return Inputs(config, servers, loss_fn, Callbacks(config, layout, callbacks), model, folder, data, notes, change)


def _start_warnings(tasks: Sequence[Task], data: Data, tokenizer: Tokenizer) -> list[str]:
    """Return the warnings about data and rewards of each task."""
    orders = data.prompts.orders if isinstance(data.prompts, Mixture) else [data.prompts]
    seconds, lines = SECONDS_AT_START / len(tasks), list[str]()
    for task, order in zip(tasks, orders, strict=True):
        if data.rewards is None:
            lines += [*order.warnings, *(line for held in data.held_rows.values() for line in held.warnings)]
        elif isinstance(order, PromptSource):
            held_out = [one for one in data.held_out if one.prompts[0].task == task.name]
            scorer, key = data.rewards.of_task(task.name), task.key("data.train")
            lines += start_warnings(task.config.rewards.functions, order, held_out, scorer, tokenizer, key, seconds)
    return lines


def _reference_folder(path: str | None, model: HfConfig, tokenizer: Tokenizer | None) -> Path | None:
    """Return the folder of `model.reference_path`, or None. Raises ValueError if the architecture differs, or the
    vocabulary, which ranks with a `tokenizer` check."""
    if path is None:
        return None
    folder = resolve_model(path, "model.reference_path")
    differing_values = architecture_differences(model, load_hf_config(folder))
    different = [f"{key}: {values}" for key, values in differing_values.items()]
    if tokenizer and not different and (folder / "tokenizer_config.json").exists():
        pairs = zip(tokenizer.pieces(), load_tokenizer(folder).pieces(), strict=False)
        different = [f"token {i}: {one!r}, {other!r}" for i, (one, other) in enumerate(pairs) if one != other][:1]
    if different:
        raise ValueError(
            f"model.reference_path: {folder} differs from the policy in architecture or vocabulary (policy, "
            f"reference): {'; '.join(different)}. Name weights that match, or leave it empty to use the policy's "
            "initial weights"
        )
    return folder


def _read_data(
    config: RunConfig,
    base_folder: Path,
    tokenizers: tuple[Tokenizer | None, Tokenizer | None],
    vocab_size: int,
    layout: Layout,
    resources: ExitStack,
) -> tuple[RunConfig, Data]:
    """Load prompts, held-out sets and rewards. Returns the config with its number of steps, and the data. `tokenizers`
    are those of a rank that generates, and of one that reads prompts."""
    tokenizer, reader = tokenizers
    tasks, first = config.each_task, layout.world_rank == 0
    sampling = on_first_rank(layout, lambda: sampling_of(config.rollout, tokenizer))
    check_run = RowReader(config, reader, vocab_size).check_run if first and reader else lambda: None
    run_own_and_agree(layout, check_run)
    of_rewards = config.all_rewards, config.rollout.max_completion_length, base_folder, config.task_rewards
    rewards = run_own_and_agree(
        layout, lambda: resources.enter_context(RewardScorer(*of_rewards)) if tokenizer else None
    )
    common = base_folder, tokenizers, vocab_size, sampling, rewards, layout, resources
    orders, sets, turns = zip(*of_all_tasks(tasks, lambda task: _read_task(task, *common)), strict=True)
    shared_trial().close()
    prompts = Mixture(tasks, orders, config.run.seed) if config.tasks else orders[0]
    dialogues = {task.name: one for task, one in zip(tasks, turns, strict=True)}
    held_out = [*chain.from_iterable(sets)]
    return config.with_num_prompts(len(prompts)), Data(tokenizer, sampling, prompts, held_out, dialogues, rewards)


def of_all_tasks[T](tasks: Sequence[Task], read: Callable[[Task], T]) -> list[T]:
    """Return what the collective `read` returns for each task. Raises one ValueError with the problems of all tasks."""
    results, problems, unexpected = list[T](), dict[str, None](), list[Exception]()
    for task in tasks:
        try:
            results.append(read(task))
        except Exception as error:  # on the other ranks a RankError, so all go on
            text = error.problem if isinstance(error, RankError) else str(error)
            problems |= dict.fromkeys(task.named_problems(text).split("\n"))
            unexpected += [] if isinstance(error, (ValueError, RankError)) else [error]
    if problems:
        raise unexpected[0] if unexpected else ValueError("\n".join(problems))
    return results


def _read_task(
    task: Task,
    base_folder: Path,
    tokenizers: tuple[Tokenizer | None, Tokenizer | None],
    vocab_size: int,
    sampling: SamplingParams,
    rewards: RewardScorer | None,
    layout: Layout,
    resources: ExitStack,
) -> tuple[PromptOrder, list[HeldOut], Dialogues | None]:
    """Load and check the prompts, the held-out sets and the turns of a task; see `Data`. Collective."""
    (tokenizer, reader), config, first = tokenizers, task.config, layout.world_rank == 0
    of_dialogues = config.multi_turn, config.data, config.rewards.names, config.rollout.max_prompt_length
    dialogues = run_own_and_agree(
        layout, lambda: make_dialogues(*of_dialogues, tokenizer, base_folder, resources) if tokenizer else None
    )
    tools, names = on_first_rank(layout, lambda: (dialogues.tools, dialogues.reward_names) if dialogues else ([], []))

    def check_tools() -> None:
        if first and reader:
            RowReader(config, reader, vocab_size).check_tools(tools, str(resolve_model(config.model.path)))

    run_own_and_agree(layout, check_tools)
    needs = on_first_rank(layout, lambda: rewards.needs(task.name) if rewards and not names else {})
    make = prompt_reader(config, reader, tools, vocab_size, first, needs, task.sampling) if reader else None

    def read(section: DatasetSection, data: DataSection, key: str) -> PromptOrder:
        """Read a data set on the ranks that generate, and with images on all; the others get the numbers of its rows.
        Collective."""
        own = (lambda: make(section, data, key)) if make else None
        return order_on_all(own, data, key, config.run.seed, layout)

    prompts = read(config.data.train, config.data, task.key("data.train"))
    held_out = load_sets(task, sampling, read, names) if config.generates else []

    def check_all_columns() -> None:
        if rewards:
            rewards.check_columns(prompts.columns, task.name)
            check_columns(held_out, rewards, dialogues, task.name)
        if dialogues:
            dialogues.check_columns(prompts.columns)

    run_own_and_agree(layout, check_all_columns)
    return prompts, held_out, dialogues


def order_on_all(
    make: Callable[[], PromptOrder] | None, data: DataSection, key: str, seed: int, layout: Layout
) -> PromptOrder:
    """Return what `make` reads on the ranks that have it; the others get the numbers of its rows. Collective."""
    source = run_own_and_agree(layout, lambda: make() if make else None)
    rows = on_first_rank(layout, lambda: source.rows if source else ())
    run_own_and_agree(layout, lambda: check_rows(key, rows, source.rows if source else rows))
    if source is None:
        return PromptOrder(rows, data, seed)
    source.rows = rows
    return source


def check_rows(key: str, first: Sequence[int], own: Sequence[int]) -> None:
    """Raise ValueError if this rank cannot use a row that rank 0 uses: the file of an image is not on all nodes. Rank 0
    may use fewer rows, because it alone tries constraints; all ranks then take its rows."""
    if first != own and (missing := {*first} - {*own}):  # equal ranges make no list of all rows
        row = min(missing)
        raise ValueError(
            f"{key}: row {row} is bad on some ranks only (data.bad_rows: skip); make the same files readable on all "
            "nodes"
        )


def _steps_notes(given: RunSection, run: RunSection, per_step: int, num_prompts: int) -> list[str]:
    """Return a line that says how `run.num_train_epochs` became a number of steps, or that it has no effect."""
    epochs, steps = given.num_train_epochs, run.num_steps
    if epochs is None:
        return []
    if given.max_steps is not None:
        return [
            f"note: run.max_steps {steps} takes precedence over run.num_train_epochs {epochs:g}; run.max_steps=null "
            "selects the epochs"
        ]
    return [
        f"{steps} steps: run.num_train_epochs {epochs:g} x {num_prompts} prompts / rollout.prompts_per_step {per_step}"
    ]
