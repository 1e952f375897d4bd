"""Draws prompts of several tasks by exact shares."""

from __future__ import annotations

import copy
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, lcm
from typing import Any

from megagrpo.config import ConfigError, Task
from megagrpo.config.basics.task_values import weights_by_step
from megagrpo.config.tasks import PassRateWeight
from megagrpo.data.sources.prompt_order import Origin, PromptOrder
from megagrpo.train_types import TrainState
from megagrpo.types import Prompt

PARTS = 1 << 20  # of a prompt
NEW_ROWS = 1 << 40  # prompt_ids of a task whose data source may return new rows
RATED_STEPS = 10  # with the task, whose groups are its pass rate


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
        keeps: bool = False,
    ):
        self.keeps = keeps  # whether tasks are still owed the rest of a prompt after the weights have changed
        self.limits = limits or [None] * len(weights)
        self.drawn = [0] * len(weights)  # prompts of each task, of at most its limit
        self.changes = [(0, weights), *changes]  # (prompts drawn before, weights from then on)
        self.begin(0)

    def begin(self, period: int) -> None:
        """Use the weights after this number of changes, and count from 0."""
        exact = [Fraction(str(weight)) for weight in self.changes[period][1]]
        common = lcm(*(weight.denominator for weight in exact))
        self.weights, self.period = [int(weight * common) for weight in exact], period
        self.counts = [0] * len(exact)  # prompts since the weights were last changed
        self.owed = [0] * len(exact)  # what each task was owed then, in parts of a prompt

    def restore(self, drawn: Sequence[int], counts: Sequence[int] | None, owed: Sequence[int] = ()) -> None:
        """Continue after `drawn` prompts of each task; `counts` None: the counts begin again."""
        self.drawn = [*drawn]
        self.begin(max(0, sum(after < sum(drawn) for after, _ in self.changes) - 1))
        self.counts, self.owed = [*counts] if counts else self.counts, [*owed] or self.owed

    def copy(self) -> Shares:
        """Return an independent copy."""
        copied = copy.copy(self)
        copied.drawn, copied.counts, copied.owed = [*self.drawn], [*self.counts], [*self.owed]
        return copied

    def _live(self) -> tuple[list[int], int, int]:
        """Return the tasks that are drawn, the sum of their weights, and of their counts."""
        left = [limit is None or self.drawn[i] < limit for i, limit in enumerate(self.limits)]
        live = [i for i, weight in enumerate(self.weights) if weight and left[i]]
        return live, sum(self.weights[i] for i in live), sum(self.counts[i] for i in live)

    def next(self) -> int:
        """Return the index of the next prompt's task, and count it. A task leaves with its last prompt."""
        if [after for after, _ in self.changes[self.period + 1 :]][:1] == [sum(self.drawn)]:
            owed = self._owed_now() if self.keeps else self.owed
            self.begin(self.period + 1)
            self.owed = owed
        live, total, counted = self._live()
        parts = {i: (self.counts[i] * PARTS - self.owed[i]) * total for i in live}
        released = [i for i, part in parts.items() if part < (counted + 1) * self.weights[i] * PARTS]
        deadline = {i: -(-(parts[i] + PARTS * total) // (self.weights[i] * PARTS)) for i in released or live}
        chosen = min(deadline, key=deadline.__getitem__)
        self.counts[chosen] += 1
        self.drawn[chosen] += 1
        return chosen

    def _owed_now(self) -> list[int]:
        """Return what each task has less than its share, in parts of a prompt; the sum is 0."""
        live, total, counted = self._live()
        owed = [0] * len(self.weights)
        for i in live:
            owed[i] = counted * self.weights[i] * PARTS // total - self.counts[i] * PARTS + self.owed[i]
        owed[live[0]] -= sum(owed)
        return owed


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
        weights, per_step = weights_by_step([task.weights for task in tasks]), tasks[0].config.rollout.prompts_per_step
        changes = [((step - 1) * per_step, of_tasks) for step, of_tasks in weights.items()]
        self._by_rate = {i: task.weight for i, task in enumerate(tasks) if isinstance(task.weight, PassRateWeight)}
        self._rates: dict[int, list[list[float]]] = {
            i: [] for i in self._by_rate
        }  # of steps: sum over prompts, prompts
        self._shares = Shares(changes[0][1], limits, changes[1:], keeps=bool(self._by_rate))
        self._first = [0]  # prompt_id of each task's row 0, and the number of all rows
        for order in orders:
            sourced = tasks[len(self._first) - 1].config.data.source is not None
            self._first.append(self._first[-1] + (NEW_ROWS if sourced else order.rows[-1] + 1))
        super().__init__((), tasks[0].config.data, seed)
        self.warnings = [warning for order in orders for warning in order.warnings]

    def __len__(self) -> int:
        return sum(map(len, self.orders))

    def sourced(self, make: Callable[[Task, PromptOrder, int], PromptOrder]) -> None:
        """Let the orders of tasks with a data source be what `make(task, order, first prompt_id)` returns."""
        rows = zip(self._tasks, self.orders, self._first, strict=False)
        self.orders = [order if task.config.data.source is None else make(task, order, n) for task, order, n in rows]

    @property
    def columns(self) -> list[str]:
        """Names of the columns that reward functions of any task get."""
        return [*dict.fromkeys(name for order in self.orders for name in order.columns)]

    def next(self, n: int) -> list[Prompt]:
        """Draw the next `n` prompts."""
        drawn = self._mixed(self._shares, n, lambda order, count: order.next(count))
        self.cursor += n
        return drawn

    def peek(self, n: int) -> list[Prompt]:
        """Return the prompts that `next(n)` would draw now, without drawing."""
        return self._mixed(self._shares.copy(), n, lambda order, count: order.peek(count))

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
        for i, (first, end) in enumerate(pairwise(self._first)):
            own = {prompt_id - first: rate for prompt_id, rate in pass_rates.items() if first <= prompt_id < end}
            found = self.orders[i].learn(own)
            if i in self._rates and own:
                self._rates[i] = [*self._rates[i], [sum(own.values()), len(own)]][-RATED_STEPS:]
                found["pass_rate"] = self._pass_rate(i)
            metrics |= {f"tasks/{self._tasks[i].name}/{name}": value for name, value in found.items()}
        return metrics | self._reweigh()

    def _pass_rate(self, task: int) -> float:
        sums, prompts = zip(*self._rates[task], strict=True)
        return sum(sums) / sum(prompts)

    def _reweigh(self) -> dict[str, float]:
        """Change the weights by pass rate, after the prompts that were requested ahead. Returns their metrics."""
        if not self._by_rate:
            return {}
        shares, rollout = self._shares, self._tasks[0].config.rollout
        weights = [*shares.changes[-1][1]]
        for i, weight in self._by_rate.items():
            weights[i] = weight.value(self._pass_rate(i)) if self._rates[i] else weight.most
        begin = self.cursor + rollout.max_staleness * rollout.prompts_per_step
        shares.changes, shares.period = [*shares.changes[shares.period :], (begin, weights)], 0
        return {f"tasks/{self._tasks[i].name}/weight": float(weights[i]) for i in self._by_rate}

    def store(self, state: TrainState) -> None:
        """Write the counts and each task's state into the run's state."""
        state.cursor, state.data = self.cursor, {"tasks": {}}
        counted = self._shares.drawn, self._shares.counts
        for task, order, drawn, count in zip(self._tasks, self.orders, *counted, strict=True):
            own = TrainState(step=state.step)
            order.store(own)
            saved = {"weight": weight_text(task), "drawn": drawn, "count": count, "cursor": own.cursor}
            state.data["tasks"][task.name] = saved | {
                "pass_rates": own.pass_rates,
                "data": own.data,
                "source": own.source,
            }
        if self._by_rate:
            changes = self._shares.changes[self._shares.period :]
            rates = {self._tasks[i].name: rates for i, rates in self._rates.items()}
            state.data["shares"] = {"owed": self._shares.owed, "changes": changes, "rates": rates}

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
            kept = {name: own[name] for name in ("cursor", "pass_rates", "data", "source") if name in own}
            order.restore(TrainState(step=state.step, **kept))
        same = [own["weight"] for own in saved.values()] == [weight_text(task) for task in self._tasks]
        counts = [own["count"] for own in saved.values()] if same else None
        kept = state.data.get("shares", {}) if same else {}
        self._shares.changes = [(begin, of_tasks) for begin, of_tasks in kept.get("changes", self._shares.changes)]
        self._rates |= {i: kept.get("rates", {}).get(self._tasks[i].name, []) for i in self._rates}
        self._shares.restore([own["drawn"] for own in saved.values()], counts, kept.get("owed", ()))

    def parts(self, state: TrainState) -> list[tuple[str, PromptOrder, dict[str, Any]]]:
        """Return (config key, order, what a state says about its data) of each task."""
        saved = state.data.get("tasks", {})
        pairs = zip(self._tasks, self.orders, strict=True)
        return [(task.key("data.train"), order, saved.get(task.name, {}).get("data", {})) for task, order in pairs]


def weight_text(task: Task) -> str:
    """Return a task's weight, or its weights by step, as a checkpoint keeps it."""
    weight = task.weight
    return json.dumps(weight.model_dump() if isinstance(weight, PassRateWeight) else weight)
