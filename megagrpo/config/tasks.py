"""Defines the sections `tasks.N`: what one task of a run has in place of the run's own data, rewards and turns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, GetJsonSchemaHandler, Tag

from megagrpo.config.basics.problems import Problem
from megagrpo.config.basics.task_values import gives_parts, merged
from megagrpo.config.sections.multi_turn import MAX_WEIGHT
from megagrpo.config.sections.section import PositiveFloat, Section

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

SECTIONS = ("data", "rewards", "multi_turn", "rollout")  # of a task
NAME = r"^[\w-][\w.-]{0,99}$"  # of a task
OF_PARTS = ("advantage_by", "turn_advantage_weight", "token_advantage_weight", "turn_discount")


class PassRateWeight(Section):
    """A weight `most` * 4 p (1 - p), at least `least`, where p is the task's pass rate: `most` at 0.5, `least` at 0 and
    at 1. The expected gain of a group of binary rewards has this form."""

    by: Literal["pass_rate"]
    most: Annotated[PositiveFloat, Field(le=MAX_WEIGHT)] = 1.0
    least: PositiveFloat = 0.1

    def value(self, pass_rate: float) -> float:
        """Return the weight, rounded to thousandths."""
        return max(self.least, round(self.most * 4 * pass_rate * (1 - pass_rate), 3))


KINDS_OF_WEIGHT = ("weight: number", "weight: by step", "weight: by pass rate")


def _kind_of_weight(weight: object) -> str:
    """Return which kind of weight the value is meant to be."""
    number, by_step, by_rate = KINDS_OF_WEIGHT
    if not isinstance(weight, Mapping):
        return by_rate if isinstance(weight, PassRateWeight) else number
    return by_rate if any(not str(key).lstrip("-").isdigit() for key in weight) else by_step


Weight = Annotated[
    Annotated[float, Tag(KINDS_OF_WEIGHT[0])]
    | Annotated[dict[int, float], Tag(KINDS_OF_WEIGHT[1])]
    | Annotated[PassRateWeight, Tag(KINDS_OF_WEIGHT[2])],
    Discriminator(_kind_of_weight),
]


class TaskSection(Section):
    name: Annotated[str, Field(pattern=NAME)]
    """Name in metrics, reward columns and messages; the name of its file, for a task in a file of its own."""
    weight: Weight = 1.0
    """Share of the prompts, relative to the other tasks' weights. The counts of drawn prompts never differ from the
    shares by a whole prompt; weights that add up to `rollout.prompts_per_step` are the prompts of each step. Weights by
    step, as `{1: 3, 100: 0}`, each hold from their step on. `{by: pass_rate, most: 1, least: 0.1}` follows the share of
    the task's responses with `data.curriculum_pass_reward` in its last 10 steps."""
    loss_weight: Annotated[float, Field(ge=1 / MAX_WEIGHT, le=MAX_WEIGHT)] = 1.0
    """Factor of the task's share of the loss: of its policy term and KL penalty. The loss keeps its denominator, so
    that factors which are all equal change nothing. `algorithm.loss_share_of_tasks`."""
    epochs: PositiveFloat | None = None
    """Passes over the task's rows, after which it leaves the mixture; the other tasks then share the prompts by their
    weights. The rows repeat when empty, as those of at least one task must."""
    data: dict[str, Any] = {}
    """Keys of the section `data` that differ from the run's."""
    rewards: dict[str, Any] = {}
    """`functions`, in place of the run's reward functions."""
    multi_turn: dict[str, Any] = {}
    """Keys of the section `multi_turn` that differ from the run's."""
    rollout: dict[str, Any] = {}
    """`max_prompt_length`, where it is less than the run's, and `num_generations`, the size of the task's groups."""
    sampling: dict[str, Any] = {}
    """Sampling parameters of the task's prompts, as in `data.sampling_column`; a row's own ones override them."""


class OrFile:
    """Metadata of a task in a list, which may also be the path of its file: `load_config` reads it."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema with a text beside the mapping."""
        return {"anyOf": [{"type": "string"}, handler(core_schema)]}


@dataclass(frozen=True)
class Task:
    """A task of a run. A run without `tasks` is one task, whose name is empty and whose config is the run's."""

    name: str
    weight: float | Mapping[int, float] | PassRateWeight  # by the step from which it holds, or by the pass rate
    config: RunConfig  # the run's, with the values of the task
    sampling: Mapping[str, Any]  # of its prompts, before a row's own parameters
    epochs: float | None = None
    loss_weight: float = 1.0

    @property
    def weights(self) -> float | Mapping[int, float]:
        """The weight, or weights by step, before a pass rate is known."""
        return self.weight.most if isinstance(self.weight, PassRateWeight) else self.weight

    def key(self, key: str) -> str:
        """Return the config key of the task for a key of the run, as `tasks.math.data.train`."""
        return f"tasks.{self.name}.{key}" if self.name else key

    def problem(self, problem: Problem) -> Problem:
        """Return a problem of the task's config with the task's keys."""
        return of_task(self.name, problem) if self.name else problem

    def named_problems(self, text: str) -> str:
        """Return the lines of an error with the task's keys in place of the run's."""
        keys = rf"^({'|'.join(SECTIONS)})(?=[.:])"
        return re.sub(keys, rf"tasks.{self.name}.\1", text, flags=re.MULTILINE) if self.name else text

    def named(self, name: str) -> str:
        """Return a name that is unique in the run for a name in this task, as `math/accuracy`."""
        return "/".join(filter(None, (self.name, name)))


def of_task(name: str, problem: Problem) -> Problem:
    """Return a problem of a task's config with the task's keys."""
    keys = tuple(f"tasks.{name}.{key}" if key.split(".")[0] in SECTIONS else key for key in problem.keys)
    return Problem(keys, problem.text)


def task_values(of_run: Mapping[str, Any], task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a task's config: those of the run, with the task's sections merged over them. A task without
    held-out prompts is not evaluated."""
    own = {name: task[name] for name in SECTIONS if isinstance(task.get(name), Mapping)}
    values = merged({key: value for key, value in of_run.items() if key != "tasks"}, own)
    evaluation = {"keep_best": None} if (values.get("data") or {}).get("eval") else {"keep_best": None, "steps": 0}
    values = merged(values, {"evaluation": evaluation, "algorithm": {"loss_share_of_tasks": None}})
    if not (values.get("data") or {}).get("images"):  # the tower is another task's
        values = merged(values, {"model": {"freeze_vision_tower": True}})
    if not gives_parts(values):
        kept = {key: value for key, value in values["algorithm"].items() if key not in OF_PARTS}
        values = values | {"algorithm": kept}
    of_run = values["algorithm"]
    steps, iterations = (of_run.get(name, 1) for name in ("steps_per_generation", "num_iterations"))
    if "num_generations" in own.get("rollout", {}) and isinstance(steps, int) and isinstance(iterations, int):
        # the task's samples are not a whole step, which steps_per_generation must divide
        values = merged(values, {"algorithm": {"steps_per_generation": 1, "num_iterations": steps * iterations}})
    return values
