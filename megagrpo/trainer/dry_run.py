"""Tries a run's inputs without weights and servers: data, one rendered prompt, lengths, and calls of each reward."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import string
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

from megagrpo.config import RunConfig, Task, evaluation_sets
from megagrpo.data.prompts import PromptSource
from megagrpo.data.sources.user_source import load_source
from megagrpo.data.tokens.request_trial import shared_trial
from megagrpo.data.tokens.row_settings import RowReader
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.environments.dialogues import Dialogues, make_dialogues
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.weight_sources import PACKAGE, resolve_model, shape_folder
from megagrpo.planner.rules.plan_problems import check
from megagrpo.records.sinks.find_trackers import check_trackers
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.trainer.data_checks.data_trial import (
    TRAIN,
    ConfiguredSet,
    SourceTrial,
    configured_sets,
    repeated_warning,
    shared_warning,
)
from megagrpo.trainer.data_checks.gold_trial import ROWS, RewardTrial
from megagrpo.trainer.data_checks.reward_trial import (
    reward_warnings,
    trial_scorer,
    try_rewards,
    unreachable_judges,
)
from megagrpo.trainer.rollout.sourced_prompts import UsableRows
from megagrpo.types import Prompt
from megagrpo.weights.bridge.image_facts import processor_of

WITHOUT_VLLM = (
    "rollout.structured_outputs: vLLM is not installed here, so only xgrammar has tried the constraints; servers may "
    "refuse more; repeat the check in their environment"
)


@dataclass
class DryRun:
    """The result: what was read and called, what was left out, and the problems."""

    ranks: int
    sources: list[SourceTrial] = field(default_factory=list)
    rewards: list[RewardTrial] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    request: tuple[int, str] | None = None  # tokens and text of an agent's first request
    not_called: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def try_agent(self, dialogues: Dialogues, source: PromptSource, max_completion_length: int | None) -> None:
        """Check the columns for an agent. With `max_completion_length` run it up to its first request."""
        dialogues.check_columns(source.columns)
        if max_completion_length is not None:
            try:
                self.request = dialogues.first_request(source.peek(1)[0], max_completion_length)
            except ValueError as error:
                self.warnings.append(str(error))

    def load_rewards(
        self, config: RunConfig, base_folder: Path, models: bool, resources: ExitStack
    ) -> RewardScorer | None:
        """Load the functions that are tried, if any, and add the names of the others."""
        scorer = None
        with Collecting(self):
            of_rewards = config.rewards, config.rollout.max_completion_length, base_folder
            scorer, self.not_called = trial_scorer(*of_rewards, models)
        return resources.enter_context(scorer) if scorer else None

    def add_source(
        self,
        configured: ConfiguredSet,
        source: PromptSource,
        train: PromptSource | None,
        tokenizer: Tokenizer,
        tools: Sequence[dict[str, Any]],
    ) -> None:
        """Add the description of a data set and its warnings, also about prompts that `train` has."""
        shared, repeated = train.shared_with(source.all()) if train else [], source.repeated()
        self.sources.append(configured.describe(source, tokenizer, tools, len(repeated), len(shared)))
        self.warnings += [*source.warnings, *repeated_warning(configured.key, repeated, len(source))]
        self.warnings += shared_warning(configured.key, shared, len(source))

    def add_tools(self, dialogues: Dialogues | None) -> Sequence[dict[str, Any]]:
        """Add the names of the tools, and return the tools."""
        tools = dialogues.tools if dialogues else ()
        self.tools += [str(tool.get("function", tool).get("name")) for tool in tools]
        return tools

    def add(self, *problems: object) -> None:
        """Add problems that are not known yet."""
        self.problems += [str(problem) for problem in problems if str(problem) not in self.problems]


@dataclass(frozen=True)
class Collecting(AbstractContextManager[None, bool]):
    """A context manager that turns a ValueError inside it into one problem per line. It is a class because a type
    checker then knows that it suppresses errors."""

    result: DryRun
    task: Task | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, ValueError):
            text = str(error) if self.task is None else self.task.named_problems(str(error))
            self.result.add(*text.split("\n"))
        return isinstance(error, ValueError)


def dry_run(config: RunConfig, base_folder: Path, models: bool = False, rows: int = ROWS) -> DryRun:
    """Try the inputs of a run; `base_folder` is the folder of its config. Rewards are tried on up to `rows` rows of
    each data set. With `models` it also loads reward models, and asks servers about all rows.

    Problems are collected, not raised.
    """
    result = DryRun(config.parallel.smallest_world)
    result.add(*check(config, result.ranks).problems)
    with Collecting(result):
        check_trackers(config.run.trackers)
    with ExitStack() as resources:
        tokenizer: Tokenizer | None = None
        known = len(result.problems)
        with Collecting(result):
            tokenizer = _tokenizer(config)
            try_tokenizer(config, tokenizer)
        if tokenizer is None or result.problems[known:]:
            return result
        with Collecting(result):
            RowReader(config, tokenizer, _vocab_size(config)).check_run()
        for task in config.each_task:
            _try_task(result, task, tokenizer, base_folder, resources, models, rows)
        if shared_trial().vllm_version == "":
            result.warnings.append(WITHOUT_VLLM)
    return result


def _try_task(
    result: DryRun,
    task: Task,
    tokenizer: Tokenizer,
    base_folder: Path,
    resources: ExitStack,
    models: bool,
    rows: int,
) -> None:
    """Add what trying the inputs of a task gives to `result`."""
    config, limit = task.config, task.config.rollout.max_prompt_length
    row_reader = RowReader(config, tokenizer, _vocab_size(config), sampling=dict(task.sampling))
    tools: Sequence[dict[str, Any]] = ()
    dialogues: Dialogues | None = None
    with Collecting(result, task):
        of_dialogues = config.multi_turn, config.data, config.rewards.names, limit
        dialogues = make_dialogues(*of_dialogues, tokenizer, base_folder, resources)
        tools = result.add_tools(dialogues)
        row_reader.check_tools(tools, _folder(config))
    scorer = result.load_rewards(config, base_folder, models, resources)
    if scorer and not result.not_called and not (dialogues and dialogues.reward_names):
        row_reader.needs = scorer.needs()
    train: PromptSource | None = None
    sets: dict[str, tuple[Sequence[Prompt], int]] = {}
    for configured in configured_sets(config.data, evaluation_sets(config)):
        trains, configured = configured.key == TRAIN, replace(configured, key=task.key(configured.key))
        key = configured.key
        with Collecting(result, task):
            source = PromptSource(
                configured.section, configured.data, tokenizer, limit, config.run.seed, key, tools, row_reader
            )
            result.add_source(configured, source, train, tokenizer, tools)
            if dialogues:
                result.try_agent(dialogues, source, config.rollout.max_completion_length if trains else None)
            longest = getattr(configured.section, "max_completion_length", config.rollout.max_completion_length)
            sets[key] = source.sample(rows), longest
            if trains:
                train = source
                config.with_num_prompts(len(source))  # the rules about the number of steps
                usable, keeps = UsableRows(source), bool(config.algorithm.dynamic_sample)
                load_source(config.data, usable, config.run.seed, keeps, task.key("data.source"))
    result.add(*unreachable_judges(config.rewards.functions))
    with Collecting(result, task):
        for trial in try_rewards(scorer, sets, tokenizer, set() if models else scorer.servers) if scorer else ():
            result.rewards.append(trial)
    _add_warnings(result, sets)


def _add_warnings(result: DryRun, keys: Iterable[str]) -> None:
    """Add failures and warnings of the rewards of each data set."""
    for key in keys:
        trials = [trial for trial in result.rewards if trial.data == key]
        result.add(*(f"rewards.functions: {trial.failure}" for trial in trials if trial.failure))
        result.warnings += [warning for warning in reward_warnings(key, trials) if warning not in result.warnings]


def _vocab_size(config: RunConfig) -> int | None:
    """Return the vocabulary of the model; None if its config.json cannot be read, which the plan reports."""
    with contextlib.suppress(ValueError):
        return load_hf_config(shape_folder(config.model.path)).vocab_size
    return None


def _tokenizer(config: RunConfig) -> Tokenizer:
    """Load the tokenizer. Of a model on the hub it fetches the files of tokenizer and image processor only."""
    hf_config = load_hf_config(shape_folder(config.model.path)) if config.data.images else None
    return processor_of(config, _folder(config), hf_config)


def _folder(config: RunConfig) -> str:
    """Return the model's folder, or its name on the hub."""
    path = config.model.path
    return str(resolve_model(path)) if path.startswith(PACKAGE) or os.path.exists(os.path.expanduser(path)) else path


RENDER_SECONDS = 60  # of CPU time
RENDER_MEMORY = 4 * 2**30  # bytes of memory more than before the trial
_NO_MEMORY = 3  # exit code


def try_tokenizer(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Render and encode one short prompt. Raises ValueError if that takes more than RENDER_SECONDS or RENDER_MEMORY.

    Other errors are not raised: the first row of the data shows them better.
    """
    with warnings.catch_warnings():  # a fork of a process with threads; the child starts none
        warnings.simplefilter("ignore", DeprecationWarning)
        child = get_context("fork").Process(target=_try, args=(config, tokenizer), daemon=True)
        child.start()
    child.join(10 * RENDER_SECONDS)  # of a busy machine
    if child.is_alive():
        child.kill()
        child.join()
    keys = f"the chat template (data.chat_template) or the tokenizer (model.tokenizer) of {config.model.path}"
    if child.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
        late = f"did not finish a prompt of 100 characters in {RENDER_SECONDS} s"
        raise ValueError(f"model.path: {keys} {late}; use another")
    if child.exitcode in (_NO_MEMORY, -signal.SIGABRT):
        need = f"needs more than {RENDER_MEMORY / 2**30:g} GiB of memory for a prompt of 100 characters"
        raise ValueError(f"model.path: {keys} {need}; use another")


def _try(config: RunConfig, tokenizer: Tokenizer) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # an abort of the tokenizer writes there
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + RENDER_MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (RENDER_SECONDS, RENDER_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data = config.data
    try:
        tokenizer.encode(string.printable, add_special_tokens=True)
        tokenizer.render(string.printable, data.system_prompt, data.chat_template, kwargs=data.chat_template_kwargs)
    except BaseException as error:
        if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
            os._exit(_NO_MEMORY)
    os._exit(0)
