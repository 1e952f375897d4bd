"""Defines the configuration of a run: typed sections, a YAML loader, and one list of all problems.

`load_config(path, overrides)` reads a YAML file, follows its `defaults:` chain, applies dotted overrides
(`train.learning_rate=1e-5`) and returns a frozen `RunConfig`, or raises one `ConfigError` that lists every problem at
once. Importing this module needs pydantic and PyYAML only, so a login node can check a run. `megagrpo/planner`
checks the rules that need the model's `config.json`.
"""

from __future__ import annotations

from megagrpo.config.basics.problems import ConfigError as ConfigError
from megagrpo.config.basics.problems import Problem as Problem
from megagrpo.config.basics.problems import ProblemError as ProblemError
from megagrpo.config.io import load_config as load_config
from megagrpo.config.io import save_config as save_config
from megagrpo.config.io import save_resolved as save_resolved
from megagrpo.config.key_table import render_help as render_help
from megagrpo.config.overrides import absolute_override as absolute_override
from megagrpo.config.overrides import override_text as override_text
from megagrpo.config.rules.config_rules import cross_field_problems as cross_field_problems
from megagrpo.config.run_config import RunConfig as RunConfig
from megagrpo.config.sections.algorithm import AlgorithmSection as AlgorithmSection
from megagrpo.config.sections.algorithm import TeacherSection as TeacherSection
from megagrpo.config.sections.data import DataSection as DataSection
from megagrpo.config.sections.data import DatasetSection as DatasetSection
from megagrpo.config.sections.evaluation import EvaluationSection as EvaluationSection
from megagrpo.config.sections.evaluation import EvaluationSet as EvaluationSet
from megagrpo.config.sections.evaluation import evaluation_sets as evaluation_sets
from megagrpo.config.sections.lora import LoraSection as LoraSection
from megagrpo.config.sections.model import ModelSection as ModelSection
from megagrpo.config.sections.model import ParallelSection as ParallelSection
from megagrpo.config.sections.multi_turn import MultiTurnSection as MultiTurnSection
from megagrpo.config.sections.placement import weight_path as weight_path
from megagrpo.config.sections.rewards import RewardFunction as RewardFunction
from megagrpo.config.sections.rewards import RewardsSection as RewardsSection
from megagrpo.config.sections.rollout import RolloutSection as RolloutSection
from megagrpo.config.sections.run import DebugSection as DebugSection
from megagrpo.config.sections.run import ProfileSection as ProfileSection
from megagrpo.config.sections.run import RunSection as RunSection
from megagrpo.config.sections.training import TrainSection as TrainSection
from megagrpo.config.tasks import Task as Task
