"""The lengths of prompts and responses that a step processes, and how many responses share a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from megagrpo.config import RunConfig, Task
from megagrpo.config.basics.task_values import weights_by_step


@dataclass(frozen=True)
class Lengths:
    """Average tokens of prompts and responses, and the greatest response length."""

    prompt: float
    response: float
    longest: float

    @property
    def sample(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True)
class Bundle:
    """An average bundle of `data/packing/sample_packing.py`: `responses` to one prompt, with one copy of the prompt."""

    prompt: float
    response: float
    responses: float

    @property
    def tokens(self) -> float:
        """Tokens of the bundle."""
        return self.prompt + self.responses * self.response

    @property
    def tokens_per_response(self) -> float:
        """Tokens that the trainer computes for one sample."""
        return self.tokens / self.responses


def responses_together(config: RunConfig, prompt: float, response: float) -> int:
    """Return the most responses in a micro-batch on a GPU that share one copy of their prompt; 1 if none is shared."""
    if not config.shares_prompts(transformer_engine=True):
        return 1
    fitting = int((config.train.max_tokens_per_micro_batch - prompt) / response)
    return max(1, min(int(mean_group(config.each_task)), fitting))


def average_bundle(config: RunConfig, lengths: Lengths) -> Bundle:
    """Return the bundle of samples of average length. A group that exceeds a micro-batch is spread over several."""
    group = mean_group(config.each_task)
    copies = ceil(group / responses_together(config, lengths.prompt, lengths.response))
    return Bundle(lengths.prompt, lengths.response, group / copies)


def expected_lengths(config: RunConfig, prompt: float | None = None, response: float | None = None) -> Lengths:
    """Return the given average lengths; where one is missing, half of the config's limit."""
    tasks, group = limits_of_tasks(config.each_task), mean_group(config.each_task)
    longest = max(task.response for task in tasks)
    prompt = prompt or sum(task.share * task.prompt for task in tasks) / 2
    response = response or sum(task.share * task.group * task.response for task in tasks) / group / 2
    return Lengths(prompt, min(response, longest), longest)


@dataclass(frozen=True)
class TaskLimits:
    """The share of the prompts that a task has in the first step, the size of its groups, and its longest prompt and
    response in tokens. A run without tasks is one task, whose name is empty."""

    name: str
    share: float
    group: int
    prompt: int
    response: int


def limits_of_tasks(tasks: Sequence[Task]) -> list[TaskLimits]:
    """Return the limits of each task."""
    weights, found = weights_by_step([task.weights for task in tasks])[1], list[TaskLimits]()
    for task, weight in zip(tasks, weights, strict=True):
        r, turns, limit = task.config.rollout, task.config.multi_turn, task.sampling.get("max_tokens")
        of_turn = min(limit, r.max_completion_length) if isinstance(limit, int) else r.max_completion_length
        response = turns.max_response_length or of_turn
        share = weight / sum(weights)
        found.append(TaskLimits(task.name, share, task.config.samples_per_row, r.max_prompt_length, response))
    return found


def mean_group(tasks: Sequence[Task]) -> float:
    """Return the mean number of responses to a prompt."""
    return sum(task.share * task.group for task in limits_of_tasks(tasks))


def step_samples(config: RunConfig) -> int:
    """Return the number of samples of a step; with tasks that of the first step."""
    return ceil(round(config.rollout.prompts_per_step * mean_group(config.each_task), 6))
