"""Draws prompts of several tasks by exact shares."""

from __future__ import annotations

import copy
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, lcm
from typing import Any

from megagrpo.config import ConfigError, Task
from megagrpo.config.basics.task_values import weights_by_step
from megagrpo.data.sources.prompt_order import Origin, PromptOrder
from megagrpo.train_types import TrainState
from megagrpo.types import Prompt


class Shares:
    """Chooses the task of each prompt. After any number n of prompts a task with the share s has n s of them, rounded
    up or down. Each task's k-th prompt has a release, floor((k - 1) / s), and a deadline, ceil(k / s); of the released
    ones the one with the earliest deadline is next, which meets all deadlines (Baruah et al. 1996, one processor).

    >>> shares = Shares([2, 1])
    >>> [shares.next() for _ in range(6)]
    [0, 0, 1, 0, 0, 1]
    """

    def __init__(
        self,
        weights: Sequence[float],
        limits: Sequence[int | None] | None = None,
        changes: Sequence[tuple[int, Sequence[float]]] = (),
    ):
        self.limits = limits or [None] * len(weights)
        self.drawn = [0] * len(weights)  # prompts of each task, of at most its limit
        self._changes = [(0, weights), *changes]  # (prompts drawn before, weights from then on)
        self.begin(0)

    def begin(self, period: int) -> None:
        """Use the weights after this number of changes, and count from 0."""
        exact = [Fraction(str(weight)) for weight in self._changes[period][1]]
        common = lcm(*(weight.denominator for weight in exact))
        self.weights, self._period = [int(weight * common) for weight in exact], period
        self.counts = [0] * len(exact)  # prompts since the weights were last changed

    def restore(self, drawn: Sequence[int], counts: Sequence[int] | None) -> None:
        """Continue after `drawn` prompts of each task; `counts` None: the counts begin again."""
        self.drawn = [*drawn]
        self.begin(max(0, sum(after < sum(drawn) for after, _ in self._changes) - 1))
        self.counts = [*counts] if counts else self.counts

    def copy(self) -> Shares:
        """Return an independent copy."""
        copied = copy.copy(self)
        copied.drawn, copied.counts = [*self.drawn], [*self.counts]
        return copied

    def next(self) -> int:
        """Return the index of the next prompt's task, and count it. A task leaves with its last prompt."""
        if [after for after, _ in self._changes[self._period + 1 :]][:1] == [sum(self.drawn)]:
            self.begin(self._period + 1)
        left = [limit is None or self.drawn[i] < limit for i, limit in enumerate(self.limits)]
        live = [i for i, weight in enumerate(self.weights) if weight and left[i]]
        total, counted = sum(self.weights[i] for i in live), sum(self.counts[i] for i in live)
        released = [i for i in live if self.counts[i] * total // self.weights[i] <= counted]
        chosen = min(released, key=lambda i: -(-(self.counts[i] + 1) * total // self.weights[i]))
        self.counts[chosen] += 1
        self.drawn[chosen] += 1
        return chosen


class Mixture(PromptOrder):
    """An endless stream of prompts of several tasks, the same on every rank; `orders` are the tasks' own streams.

    A prompt's `position` counts the prompts of all tasks. Its `prompt_id` is its row plus the rows of the tasks before
    its own, so that it is unique in the run.
    """

    def __init__(self, tasks: Sequence[Task], orders: Sequence[PromptOrder], seed: int):
        self._tasks, self.orders = tasks, orders
        limits = [
            ceil(task.epochs * len(each)) if task.epochs else None for task, each in zip(tasks, orders, strict=True)
        ]
        weights, per_step = weights_by_step([task.weight for task in tasks]), tasks[0].config.rollout.prompts_per_step
        changes = [((step - 1) * per_step, of_tasks) for step, of_tasks in weights.items()]
        self._shares = Shares(changes[0][1], limits, changes[1:])
        self._first = [0]  # prompt_id of each task's row 0, and the number of all rows
        for order in orders:
            self._first.append(self._first[-1] + order.rows[-1] + 1)
        super().__init__((), tasks[0].config.data, seed)
        self.warnings = [warning for order in orders for warning in order.warnings]

    def __len__(self) -> int:
        return sum(map(len, self.orders))

    @property
    def columns(self) -> list[str]:
        """Names of the columns that reward functions of any task get."""
        return [*dict.fromkeys(name for order in self.orders for name in order.columns)]

    def next(self, n: int) -> list[Prompt]:
        """Draw the next `n` prompts."""
        drawn = self._mixed(self._shares, n, PromptOrder.next)
        self.cursor += n
        return drawn

    def peek(self, n: int) -> list[Prompt]:
        """Return the prompts that `next(n)` would draw now, without drawing."""
        return self._mixed(self._shares.copy(), n, PromptOrder.peek)

    def _mixed(self, shares: Shares, n: int, draw: Any) -> list[Prompt]:
        chosen = [shares.next() for _ in range(n)]
        drawn = {task: iter(draw(self.orders[task], count)) for task, count in Counter(chosen).items()}
        return [self._of_task(task, next(drawn[task]), self.cursor + i) for i, task in enumerate(chosen)]

    def _of_task(self, task: int, prompt: Prompt, position: int) -> Prompt:
        prompt_id = self._first[task] + prompt.prompt_id
        expected = self.response_lengths.expected(prompt_id)
        of_task = self._tasks[task]
        return replace(
            prompt,
            prompt_id=prompt_id,
            position=position,
            expected_length=expected,
            task=of_task.name,
            num_generations=of_task.config.rollout.num_generations,
        )

    def origin(self, prompt_id: int) -> Origin:
        """Return the config key of a prompt's data set, its row there, and the bad rows of the set."""
        task = bisect_right(self._first, prompt_id) - 1
        return self._tasks[task].key("data.train"), prompt_id - self._first[task], self.orders[task].bad

    def leave_out(self, rows: Collection[int]) -> None:
        """Never draw the rows with these `prompt_id`s again. Raises ValueError if a task has no row left."""
        for first, end, order in zip(self._first, self._first[1:], self.orders, strict=False):
            order.leave_out([row - first for row in rows if first <= row < end])

    def learn(self, pass_rates: Mapping[int, float]) -> dict[str, float]:
        """Give each task's curriculum the pass rates of its prompts. Returns their metrics by task."""
        metrics: dict[str, float] = {}
        for task, first, end, order in zip(self._tasks, self._first, self._first[1:], self.orders, strict=False):
            own = {prompt_id - first: rate for prompt_id, rate in pass_rates.items() if first <= prompt_id < end}
            metrics |= {f"tasks/{task.name}/{name}": value for name, value in order.learn(own).items()}
        return metrics

    def store(self, state: TrainState) -> None:
        """Write the counts and each task's state into the run's state."""
        state.cursor, state.data = self.cursor, {"tasks": {}}
        counted = self._shares.drawn, self._shares.counts
        for task, order, drawn, count in zip(self._tasks, self.orders, *counted, strict=True):
            own = TrainState()
            order.store(own)
            saved = {"weight": weight_text(task), "drawn": drawn, "count": count, "cursor": own.cursor}
            state.data["tasks"][task.name] = saved | {"pass_rates": own.pass_rates, "data": own.data}

    def restore(self, state: TrainState) -> None:
        """Continue from the state of a checkpoint. Raises ConfigError for other tasks. With other weights the counts
        begin again."""
        saved, names = state.data.get("tasks", {}), [task.name for task in self._tasks]
        if [*saved] != names:
            was = ", ".join(saved) or "none"
            raise ConfigError(
                f"tasks: the checkpoint has the tasks {was}, and the config {', '.join(names)}; name the same"
            )
        self.cursor = state.cursor
        for order, own in zip(self.orders, saved.values(), strict=True):
            order.restore(TrainState(cursor=own["cursor"], pass_rates=own["pass_rates"], data=own["data"]))
        same = [own["weight"] for own in saved.values()] == [weight_text(task) for task in self._tasks]
        counts = [own["count"] for own in saved.values()] if same else None
        self._shares.restore([own["drawn"] for own in saved.values()], counts)

    def parts(self, state: TrainState) -> list[tuple[str, PromptOrder, dict[str, Any]]]:
        """Return (config key, order, what a state says about its data) of each task."""
        saved = state.data.get("tasks", {})
        pairs = zip(self._tasks, self.orders, strict=True)
        return [(task.key("data.train"), order, saved.get(task.name, {}).get("data", {})) for task, order in pairs]


def weight_text(task: Task) -> str:
    """Return a task's weight, or its weights by step, as a checkpoint keeps it."""
    return json.dumps(task.weight)
