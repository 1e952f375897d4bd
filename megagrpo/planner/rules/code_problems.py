"""Finds problems of code named in the config: rewards, the user's loss, callbacks, trackers, tools and environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megagrpo.config import MultiTurnSection, Problem, ProblemError, RunConfig
from megagrpo.config.sections.tracker_options import TRACKER_PACKAGES
from megagrpo.environments.environment_registry import SCHEDULERS, locate_environment, locate_tool
from megagrpo.environments.programs.agent_options import PROGRAM_HOST, agent_options
from megagrpo.rewards.registry.reward_registry import locate, resolve, undefined, unknown_arguments
from megagrpo.rewards.registry.target import Target
from megagrpo.suggestions import did_you_mean


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
            target = resolve(reward.function, key)
            yield from undefined(target, key)
            yield from unknown_arguments(reward.function, target, reward.args, f"rewards.functions.{i}.args")
        except ProblemError as error:
            yield from error.problems
    for key, (name, find) in named.items():
        try:
            yield from undefined(find(name, key), key)
        except ProblemError as error:
            yield from error.problems


_Named = dict[str, tuple[Any, Callable[[Any, str], Target]]]  # config key -> name, function that locates it


def _locate_agent(agent: str | dict[str, Any], key: str) -> Target:
    function = agent_options(agent).function
    return PROGRAM_HOST if function is None else locate(function, key, "agent", {})


def _own(kind: str, built_in: dict[str, str] | None = None) -> Callable[[str, str], Target]:
    return partial(locate, kind=kind, built_in=built_in or {})


def _of_run(config: RunConfig) -> _Named:
    """Return the user's own callbacks, trackers, data source, loss, advantages, optimizer, schedule and transport."""
    named: _Named = {f"run.callbacks.{i}": (name, _own("callback")) for i, name in enumerate(config.run.callbacks)}
    trackers = ((i, name) for i, name in enumerate(config.run.trackers) if name not in TRACKER_PACKAGES)
    named |= {f"run.trackers.{i}": (name, _own("tracker")) for i, name in trackers}
    if config.data.source is not None:
        named["data.source"] = (config.data.source, _own("data source"))
    if ":" in config.rollout.weight_sync_transport:
        named["rollout.weight_sync_transport"] = (config.rollout.weight_sync_transport, _own("transport"))
    if config.algorithm.loss.custom:
        named["algorithm.loss_type"] = (config.algorithm.loss_type, _own("loss"))
    if config.algorithm.own_estimator:
        named["algorithm.advantage_estimator"] = (config.algorithm.advantage_estimator, _own("estimator"))
    if config.train.own_optimizer:
        named["train.optimizer"] = (config.train.optimizer, _own("optimizer"))
    if config.train.own_schedule:
        named["train.lr_scheduler_type"] = (config.train.lr_scheduler_type, _own("schedule"))
    return named


def _of_turns(turns: MultiTurnSection) -> _Named:
    """Return the tools, the scheduler, the environment and the agent."""
    named: _Named = {f"multi_turn.tools.{i}": (name, locate_tool) for i, name in enumerate(turns.tools)}
    if turns.scheduler:
        named["multi_turn.scheduler"] = (turns.scheduler, _own("scheduler", SCHEDULERS))
    if turns.environment:
        named["multi_turn.environment"] = (turns.environment, locate_environment)
    if turns.agent:
        named["multi_turn.agent"] = (turns.agent, _locate_agent)
    return named
