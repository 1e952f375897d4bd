"""Finds problems of code named in the config: rewards, the user's loss, callbacks, trackers, tools and environments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from megagrpo.config import MultiTurnSection, Problem, ProblemError, RunConfig
from megagrpo.config.tracker_options import TRACKER_PACKAGES
from megagrpo.environments.environment_registry import targets
from megagrpo.rewards import reward_registry
from megagrpo.rewards.target import Target, did_you_mean


def reward_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield unknown reward names, and files that do not exist or do not define the function."""
    name, names = config.evaluation.pass_function, reward_registry.display_names(config.rewards.functions)
    # a scheduler or an environment may give rewards by other names
    if name and name not in names and not config.multi_turn.scheduler and not config.multi_turn.environment:
        said = f"no reward function `{name}`{did_you_mean(name, names)}; name one of {', '.join(names)}"
        yield Problem(("evaluation.pass_function", "rewards.functions"), said)
    for i, reward in enumerate(config.rewards.functions):
        key = f"rewards.functions.{i}.function"
        try:
            yield from undefined(reward_registry.resolve(reward.function, config.rewards.plugins, key=key), key)
        except ProblemError as error:
            yield from error.problems


def own_code_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield files and names of the user's own loss, transport, callbacks and trackers that do not exist."""
    named = {f"run.callbacks.{i}": (name, "callback") for i, name in enumerate(config.run.callbacks)}
    if ":" in config.rollout.weight_sync_transport:
        named["rollout.weight_sync_transport"] = (config.rollout.weight_sync_transport, "transport")
    named |= {
        f"run.trackers.{i}": (name, "tracker")
        for i, name in enumerate(config.run.trackers)
        if name not in TRACKER_PACKAGES
    }
    if config.algorithm.loss.custom:
        named["algorithm.loss_type"] = (config.algorithm.loss_type, "loss")
    for key, (name, kind) in named.items():
        try:
            yield from undefined(reward_registry.locate(name, key, kind, {}), key, rule=None)
        except ProblemError as error:
            yield from error.problems


def undefined(target: Target, key: str, rule: int | None = 18) -> list[Problem]:
    """Return the problem of a name that the file of `target` does not define.

    The file is parsed, not run, so the names of a star import remain unknown.
    """
    if not target.location.endswith(".py"):
        return []
    try:
        body = list(ast.walk(ast.parse(Path(target.location).read_bytes())))
    except SyntaxError as error:
        return [Problem((key,), f"{target.location}, line {error.lineno}: not valid Python: {error.msg}", rule=rule)]
    except (OSError, ValueError):
        return []  # the run reports the error
    defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    names = set(defined) | {node.id for node in body if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imports = (node for node in body if isinstance(node, ast.Import | ast.ImportFrom))
    names |= {alias.asname or alias.name for node in imports for alias in node.names}
    if target.attribute in names or "*" in names:
        return []
    hint = did_you_mean(target.attribute, names)
    said = f"{target.location} defines no `{target.attribute}`{hint}; it defines {', '.join(defined) or 'nothing'}"
    return [Problem((key,), said, rule=rule)]


def multi_turn_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield unknown names of schedulers, tools and environments."""
    named = {key: getattr(config.multi_turn, key) for key in ("scheduler", "environment")}
    known = {key: name for key, name in named.items() if name is not None}
    try:
        scheduler, tools, environment = targets(MultiTurnSection(**known, tools=config.multi_turn.tools))
    except ProblemError as error:
        yield from error.problems
        return
    by_key = {"multi_turn.scheduler": scheduler, "multi_turn.environment": environment}
    by_key |= {f"multi_turn.tools.{i}": tool for i, tool in enumerate(tools)}
    for key, target in by_key.items():
        if target is not None:
            yield from undefined(target, key)
