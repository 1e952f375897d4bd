"""Defines the configuration of a run: typed sections, a YAML loader, and one list of all problems.

`load_config(path, overrides)` reads a YAML file, follows its `defaults:` chain, applies dotted overrides
(`train.learning_rate=1e-5`) and returns a frozen `RunConfig`, or raises one `ConfigError` that lists every problem at
once. Importing this module needs pydantic and PyYAML only, so a login node can check a run. `megagrpo/proof/plan`
checks the rules that need the model's `config.json`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic import model_validator

from megagrpo.config import io
from megagrpo.config.algorithm import AlgorithmSection as AlgorithmSection
from megagrpo.config.config_rules import cross_field_problems, step_problems
from megagrpo.config.data import DataSection as DataSection
from megagrpo.config.data import DatasetSection as DatasetSection
from megagrpo.config.evaluation import EvaluationSection as EvaluationSection
from megagrpo.config.evaluation import EvaluationSet as EvaluationSet
from megagrpo.config.evaluation import evaluation_sets as evaluation_sets
from megagrpo.config.lora import LoraSection as LoraSection
from megagrpo.config.model import ModelSection as ModelSection
from megagrpo.config.model import ParallelSection as ParallelSection
from megagrpo.config.multi_turn import MultiTurnSection as MultiTurnSection
from megagrpo.config.overrides import absolute_override as _absolute
from megagrpo.config.overrides import override_text as _text
from megagrpo.config.paths import anchored
from megagrpo.config.placement import weight_path as weight_path
from megagrpo.config.problems import ConfigError as ConfigError
from megagrpo.config.problems import Problem as Problem
from megagrpo.config.problems import ProblemError as ProblemError
from megagrpo.config.rewards import RewardFunction as RewardFunction
from megagrpo.config.rewards import RewardsSection as RewardsSection
from megagrpo.config.rollout import RolloutSection as RolloutSection
from megagrpo.config.run import DebugSection as DebugSection
from megagrpo.config.run import ProfileSection as ProfileSection
from megagrpo.config.run import RunSection as RunSection
from megagrpo.config.section import Section
from megagrpo.config.training import TrainSection as TrainSection


class RunConfig(Section):
    """The configuration of a run. `defaults:` in a YAML file names the file that it extends."""

    run: RunSection = RunSection()
    model: ModelSection
    lora: LoraSection = LoraSection()
    parallel: ParallelSection = ParallelSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()
    multi_turn: MultiTurnSection = MultiTurnSection()
    data: DataSection
    rewards: RewardsSection
    train: TrainSection = TrainSection()
    evaluation: EvaluationSection = EvaluationSection()
    debug: DebugSection = DebugSection()

    @property
    def max_response_length(self) -> int:
        """Longest response in tokens, messages of tools and schedulers included."""
        return self.multi_turn.max_response_length or self.rollout.max_completion_length

    @property
    def response_limit(self) -> str:
        """The config key that sets `max_response_length`, with its value, as text for messages."""
        own = self.multi_turn.max_response_length
        return (
            f"max_completion_length {self.rollout.max_completion_length}"
            if own is None
            else f"multi_turn.max_response_length {own}"
        )

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus longest response, in tokens."""
        return self.rollout.max_prompt_length + self.max_response_length

    @property
    def longest_sequence(self) -> int:
        """Longest sequence of an engine in tokens: the longest sample, or the longest prompt plus the longest response
        of an evaluation."""
        held_out = [s.max_completion_length for s in evaluation_sets(self).values()]
        return max(self.max_model_len, self.rollout.max_prompt_length + max(held_out, default=0))

    @property
    def micro_batch_align(self) -> int:
        """Every micro-batch is padded to a multiple of this many tokens, for the layout and for products in FP8."""
        return self.parallel.micro_batch_align(self.model.token_align)

    def with_num_prompts(self, num_prompts: int) -> RunConfig:
        """Return the config with `run.max_steps` set from `run.num_train_epochs`, for `num_prompts` training prompts;
        itself if `run.num_train_epochs` does not decide. Raises ProblemError when other keys do not fit the number of
        steps."""
        run = self.run
        if run.max_steps is not None or run.num_train_epochs is None:
            return self
        steps = math.ceil(Fraction(str(run.num_train_epochs)) * num_prompts / self.rollout.prompts_per_step)
        config = self.model_copy(update={"run": run.model_copy(update={"max_steps": steps})})
        if problems := step_problems(config):
            raise ProblemError(*problems)
        return config

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        problems = cross_field_problems(self)
        if problems:
            raise ProblemError(*problems)
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config in the YAML file `path`, or the shipped config `megagrpo:NAME`, with `key=value` overrides
    applied. Raises one ConfigError that lists every problem at once."""
    return io.load(RunConfig, path, overrides, anchored)


def absolute_override(override: str) -> str:
    """Return `key=value` with absolute paths, for a process with another current folder."""
    return _absolute(RunConfig, override, anchored)


def override_text(key: str, value: Any) -> str:
    """Return the value of a key as `key=value`, as on the command line. Raises ConfigError when a key of text gets no
    text."""
    return _text(RunConfig, key, value)


def render_help(within: str = "") -> str:
    """Return every key with its type, default and description, as text. `within` limits it to one key and the keys
    below."""
    return io.render_help(RunConfig, within)


def save_resolved(config: RunConfig, folder: str | Path) -> Path:
    """Write `resolved.yaml` into `folder` and return its path. It loads back to an equal config from any folder."""
    path = Path(folder) / "resolved.yaml"
    save_config(config, path)
    return path


def save_config(config: RunConfig, path: Path) -> None:
    """Write every value as YAML that loads back to an equal config. Its paths are absolute; relative ones count from
    the current folder."""
    io.save(anchored(config.model_dump(), Path()), path)
