"""Finds problems of code named in the config: rewards, the user's loss, callbacks, trackers, tools and environments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megagrpo.config import MultiTurnSection, Problem, ProblemError, RunConfig
from megagrpo.config.tracker_options import TRACKER_PACKAGES
from megagrpo.environments.environment_registry import SCHEDULERS, TOOLS
from megagrpo.platform.process.hints import did_you_mean
from megagrpo.rewards.reward_registry import locate, resolve, undefined

REWARD_RULE = 18  # of docs/plan.md: reward functions exist


def code_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield unknown names, and files that do not exist or do not define the named function or class."""
    name, names, turns = config.evaluation.pass_function, config.rewards.names, config.multi_turn
    named = _of_run(config) | _of_turns(turns)
    # a scheduler or an environment may give rewards by other names
    if name and name not in names and not turns.scheduler and not turns.environment:
        said = f"no reward function `{name}`{did_you_mean(name, names)}; name one of {', '.join(names)}"
        yield Problem(("evaluation.pass_function", "rewards.functions"), said)
    for i, reward in enumerate(config.rewards.functions):
        key = f"rewards.functions.{i}.function"
        try:
            target = resolve(reward.function, config.rewards.plugins, key)
            yield from undefined(target, key, REWARD_RULE)
        except ProblemError as error:
            yield from error.problems
    for key, (name, kind, built_in) in named.items():
        try:
            target = locate(name, key, kind, built_in)
            yield from undefined(target, key, REWARD_RULE if key.startswith("multi_turn.") else None)
        except ProblemError as error:
            yield from error.problems


_Named = dict[str, tuple[str, str, Mapping[str, str]]]  # config key -> name, kind, built-in names


def _of_run(config: RunConfig) -> _Named:
    """Return the user's own callbacks, trackers, loss, optimizer, schedule and transport of weights."""
    named: _Named = {f"run.callbacks.{i}": (name, "callback", {}) for i, name in enumerate(config.run.callbacks)}
    trackers = ((i, name) for i, name in enumerate(config.run.trackers) if name not in TRACKER_PACKAGES)
    named |= {f"run.trackers.{i}": (name, "tracker", {}) for i, name in trackers}
    if ":" in config.rollout.weight_sync_transport:
        named["rollout.weight_sync_transport"] = (config.rollout.weight_sync_transport, "transport", {})
    if config.algorithm.loss.custom:
        named["algorithm.loss_type"] = (config.algorithm.loss_type, "loss", {})
    if config.train.own_optimizer:
        named["train.optimizer"] = (config.train.optimizer, "optimizer", {})
    if config.train.own_schedule:
        named["train.lr_scheduler_type"] = (config.train.lr_scheduler_type, "schedule", {})
    return named


def _of_turns(turns: MultiTurnSection) -> _Named:
    """Return the tools, the scheduler and the environment."""
    named: _Named = {f"multi_turn.tools.{i}": (name, "tool", TOOLS) for i, name in enumerate(turns.tools)}
    if turns.scheduler:
        named["multi_turn.scheduler"] = (turns.scheduler, "scheduler", SCHEDULERS)
    if turns.environment:
        named["multi_turn.environment"] = (turns.environment, "environment", {})
    return named
