"""Checks the rules of a run with several tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megagrpo.config.basics.problems import Problem
from megagrpo.config.basics.task_values import gives_parts, merged, weights_by_step

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

_ONE = "is one value for all tasks; set it for the run"
OF_RUN = {  # keys that a task cannot have -> reason
    **dict.fromkeys(("data.chat_template_kwargs", "data.curriculum_pass_reward"), _ONE),
    **dict.fromkeys(("rewards.timeout", "rewards.workers", "rewards.concurrency"), _ONE),
    **dict.fromkeys(("multi_turn.tool_parser", "multi_turn.follow_up_tokens"), _ONE),
}


def task_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield names that two tasks have, keys that tasks cannot have, and settings of the run that tasks exclude."""
    for name, count in Counter(task.name for task in config.tasks).items():
        if count > 1:
            yield Problem((f"tasks.{name}.name",), f"{count} tasks have this name; give each its own")
    for task in config.tasks:
        own = task.model_dump()
        for key, reason in OF_RUN.items():
            section, name = key.split(".")
            if name in own[section]:
                yield Problem((f"tasks.{task.name}.{key}",), reason)
        if own["data"].get("images") and not config.data.images:
            reason = "images load the model's vision tower; set data.images for the run, and to false in tasks of text"
            yield Problem((f"tasks.{task.name}.data.images", "data.images"), reason)
        if task.epochs and own["data"].get("source", config.data.source):
            reason = "data.source decides how often a row is drawn, so an epoch has no length; leave one of them out"
            yield Problem((f"tasks.{task.name}.epochs", f"tasks.{task.name}.data.source"), reason)
        yield from _rollout_problems(config, task.name, own["rollout"])
    if not config.tasks:
        if config.algorithm.loss_share_of_tasks:
            yield Problem(
                ("algorithm.loss_share_of_tasks", "tasks"), "the run has no tasks; leave it empty, or name some"
            )
        return
    if (by := config.algorithm.advantage_by) != "trajectory":
        values = config.model_dump()
        if not any(gives_parts(merged(values, task.model_dump())) for task in config.tasks):
            reason = f"{by}: no task has turns or rewards that it compares; set it to trajectory"
            yield Problem(("algorithm.advantage_by", "tasks"), reason)
    yield from _share_problems(config)
    rests = any(task.data.get("curriculum", config.data.curriculum) for task in config.tasks)
    refused = {
        "rollout.max_staleness": (
            bool(config.rollout.max_staleness and rests),
            "a prompt that was requested ahead cannot rest; leave data.curriculum out, or set it to 0",
        ),
        "algorithm.multi_objective_aggregation": (
            config.algorithm.multi_objective_aggregation != "sum_then_normalize",
            "tasks have different reward functions, which are not normalised together; choose sum_then_normalize",
        ),
        "evaluation.sets": (bool(config.evaluation.sets), "tasks have their own data.eval; name the sets there"),
    }
    for key, (wrong, reason) in refused.items():
        if wrong:
            yield Problem((key, "tasks"), f"with tasks: {reason}")


def _share_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield wrong weights, and steps from which on no task would be left."""
    weights = {task.name: task.weight for task in config.tasks}
    planned = {name: weight if isinstance(weight, int | float | Mapping) else 1.0 for name, weight in weights.items()}
    wrong = [(f"tasks.{name}.weight", text) for name, own in weights.items() if (text := _wrong_weight(own))]
    yield from (Problem((key,), text) for key, text in wrong)
    if planned != weights and (by_step := [name for name, weight in weights.items() if isinstance(weight, Mapping)]):
        reason = "weights by step do not mix with weights by pass rate of other tasks; give it one weight"
        yield Problem((f"tasks.{by_step[0]}.weight", "tasks"), reason)
    endless = [planned[task.name] for task in config.tasks if not task.epochs]
    if not endless:
        yield Problem(("tasks",), "all tasks have `epochs`, so none would be left; leave it out of one of them")
    for step, of_step in weights_by_step([] if wrong else endless).items():
        if of_step and not any(of_step):
            reason = f"from step {step} on only tasks with `epochs` have a weight above 0; give one to another task"
            yield Problem(("tasks",), reason)


def _wrong_weight(weight: Any) -> str | None:
    """Return what is wrong with a task's weight, weights by step or by pass rate; None if nothing is."""
    if not isinstance(weight, int | float | Mapping):
        if weight.least <= weight.most < math.inf:
            return None
        return f"`least` must be at most `most` (got {weight.least:g} and {weight.most:g})"
    if not isinstance(weight, Mapping):
        return None if 0 < weight < math.inf else f"must be greater than 0 (got {weight:g})"
    if min(weight, default=0) != 1:
        return "the first weight is that of step 1; begin with `1: ...`"
    wrong = [f"{step}: {value:g}" for step, value in weight.items() if not 0 <= value < math.inf]
    return f"must be at least 0 in each step (got {wrong[0]})" if wrong else None


def _rollout_problems(config: RunConfig, task: str, rollout: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield keys of a task's `rollout` that are the run's, and a prompt length above the run's."""
    for key in sorted({*rollout} & {*type(config.rollout).model_fields} - {"max_prompt_length", "num_generations"}):
        fix = "limit the task by sampling.max_tokens" if key == "max_completion_length" else _ONE
        yield Problem((f"tasks.{task}.rollout.{key}",), fix)
    longest, own = config.rollout.max_prompt_length, rollout.get("max_prompt_length", 1)
    if isinstance(own, int) and own > longest:
        reason = f"{own} is more than rollout.max_prompt_length {longest}, for which memory is planned; raise that one"
        yield Problem((f"tasks.{task}.rollout.max_prompt_length", "rollout.max_prompt_length"), reason)
