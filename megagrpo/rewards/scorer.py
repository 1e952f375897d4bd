"""Scoring of rollouts: runs the configured reward functions in worker processes and sums their weighted results."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megagrpo.config import RewardsSection
from megagrpo.rewards.arguments import check_needs
from megagrpo.rewards.registry.reward_registry import asks_service, no_such_argument, resolve
from megagrpo.rewards.scoring import Function, Scoring
from megagrpo.rewards.workers.pool import SHARED, Call, WorkerPool
from megagrpo.row_image import without_images
from megagrpo.types import Rollout, ScoredRollout

BUILT_IN_PACKAGE = "megagrpo.rewards.functions."
COROUTINES = "coroutines"  # lane (queue) of the one worker that runs many async calls concurrently


class RewardScorer:
    """Runs `rewards.functions` on rollouts in worker processes, each call with a deadline.

    Arguments are keywords as in TRL: `prompts`, `completions`, `completion_ids`, every data set column, the function's
    own `args`, and `finish_reason`, `is_truncated`, `prefixes`, `trajectories`, `max_completion_length`,
    `trainer_state` (`.global_step`), and the callables `log_extra` and `log_metric` (in `reward_values.py`). A function
    gets the ones that it accepts. `prefixes` has the end of each rendered prompt that opens a thought, such as
    "<think>\\n", else "".

    For a prompt that is a list of messages, the completion is a list with one assistant message; with several turns it
    has all messages after the prompt. For a string prompt it is a string; with several turns it is the policy's last
    message. `completion_ids` are the tokens that the policy wrote.

    A function returns one number, or None for "cannot score", per completion; with `per: turn` or `per: token` a list
    of numbers or None, in the order of `trajectories`. A call has one whole group.
    docs/rewards.md#when-a-call-fails states what a failure costs, and how `independent` functions differ.

    Plain functions share `rewards.workers` processes. Async functions run concurrently in one more process, up to
    `rewards.concurrency` calls. Reward models and functions with `own_worker` have a process each. The constructor
    loads all functions. It raises ValueError for an unknown name, a function that cannot be imported, or an argument
    that a function does not take. Modules are searched in `base_folder` after the current folder. Call `close` at the
    end (or use `with`). `of_tasks` are the names of each task's functions by its name, if a run has several.
    """

    def __init__(
        self,
        section: RewardsSection,
        max_completion_length: int,
        base_folder: str | Path | None = None,
        of_tasks: Mapping[str, Collection[str]] | None = None,
    ):
        self._of_tasks = of_tasks or {}
        self.functions: dict[str, Function] = {}  # by name, in configured order
        self.servers = {
            name for name, f in zip(section.names, section.functions, strict=True) if asks_service(f.function)
        }
        for i, (name, f) in enumerate(zip(section.names, section.functions, strict=True)):
            target, timeout = resolve(f.function), f.timeout or section.timeout
            lane = f"function {i}" if f.own_worker or target.heavy else SHARED
            if f.per != "trajectory" and target.location.startswith(BUILT_IN_PACKAGE):
                reason = f"{f.per} only applies to a function of your own; `{name}` gives a number per completion"
                raise ValueError(f"rewards.functions[{i}].per: {reason}; leave it out")
            self.functions[name] = Function(name, target, f.weight, f.args, timeout, lane, f.independent, f.per)
        self.max_completion_length, self._concurrency = max_completion_length, section.concurrency
        self._seen_failures: dict[tuple[str, str], str] = {}
        self._last: Scoring | None = None
        self.own_judges: dict[str, dict[str, str]] = {}  # {url, key} of `judge: policy` and `judge: reference`
        self._pool = WorkerPool(section.workers, None if base_folder is None else str(Path(base_folder).resolve()))
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        """Names of the functions in configured order: the keys of `ScoredRollout.rewards`."""
        return list(self.functions)

    @property
    def tracebacks(self) -> dict[str, str]:
        """Name -> first traceback of each function that has raised; else the reason why its rewards were rejected."""
        kinds = ("value", "invalid", "error")
        return {name: reason for last in kinds for (name, kind), reason in self._seen_failures.items() if kind == last}

    def _load(self) -> None:
        """Import every function once and check its arguments; all problems are raised together. Async functions are
        also loaded in their worker."""
        functions = list(self.functions.values())
        for function in functions:
            if function.lane != SHARED:
                self._pool.add_lane(function.lane)
        self._load_in_workers(functions)
        coroutines = [f for f in functions if f.is_coroutine]
        for function in coroutines:
            if function.lane != SHARED:
                key = f"rewards.functions[{functions.index(function)}].own_worker"
                raise ValueError(f"{key}: `{function.name}` is async and shares a worker; remove own_worker")
        if coroutines:
            self._pool.add_lane(COROUTINES, capacity=self._concurrency)
            for function in coroutines:
                function.lane = COROUTINES
            self._load_in_workers(coroutines)

    def _load_in_workers(self, functions: list[Function]) -> None:
        """Set `signature` of each function. Raises ValueError with all functions and arguments that are invalid."""
        problems: list[str] = []
        names = self.names
        calls = [Call(f.target, f.args, "describe", timeout=f.timeout, lane=f.lane) for f in functions]
        for function, outcome in zip(functions, self._pool.run(calls), strict=True):
            key = f"rewards.functions[{names.index(function.name)}]"
            if outcome.kind != "result":
                problems.append(f"{key}: `{function.name}` cannot be loaded: {outcome.value}")
                continue
            function.signature = outcome.value
            options = function.signature["options"]
            problems += [
                f"{key}.args.{name}: {no_such_argument(function.name, name, options)}"
                for name in function.signature["unknown"]
            ]
        if problems:
            raise ValueError("\n".join(sorted(problems)))

    def _names_of(self, task: str) -> Collection[str] | None:
        """Return the names of the functions of a task; None: all."""
        return self._of_tasks[task] if self._of_tasks else None

    def of_task(self, task: str) -> RewardScorer:
        """Return a view with the functions of a task, which shares the workers."""
        view = copy.copy(self)
        view.functions = {function.name: function for function in self._chosen(self._names_of(task))}
        return view

    def needs(self, task: str = "") -> dict[str, tuple[tuple[str, ...], ...]]:
        """Return the columns that a row of the task must have a value of, by function: a row that lacks one of each
        function cannot be scored. Functions without columns only look at the text. Empty if a model or server scores
        text alone."""
        weighted = [f for f in self._chosen(self._names_of(task)) if f.weight]
        if any((f.target.heavy or f.name in self.servers) and not f.signature["needs"] for f in weighted):
            return {}
        return {f.name: f.signature["needs"] for f in weighted if f.signature["needs"]}

    def check_columns(self, columns: Iterable[str], task: str = "") -> None:
        """Raise ValueError when a function of the task needs a column not in `columns`, the data set's names after
        renaming."""
        functions = self._chosen(self._names_of(task))
        needs = {f"rewards.functions: reward `{f.name}`": f.signature["needs"] for f in functions}
        check_needs(needs, list(columns))

    def row_faults(self, rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, str]]]:
        """Return, for each function with a method `row_fault`, (index of the row, reason) of the rows it cannot score.

        `rows` are columns and values as in `Prompt.columns`. Images are left out: all rows travel in one message."""
        rows = [*map(without_images, rows)]
        functions = [f for f in self.functions.values() if f.signature["finds_row_faults"]]
        calls = []
        for f in functions:
            lane = SHARED if f.is_coroutine else f.lane  # `row_fault` is a plain function, also of an async reward
            calls.append(Call(f.target, f.args, "row_faults", {"rows": rows}, f.timeout, lane))
        faults: dict[str, list[tuple[int, str]]] = {}
        for function, outcome in zip(functions, self._pool.run(calls), strict=True):
            error = f"no answer within {function.timeout:g} s" if outcome.kind == "timeout" else outcome.value
            reasons = outcome.value if outcome.kind == "result" else [f"its row_fault fails: {error}"] * len(rows)
            faults[function.name] = [(i, reason) for i, reason in enumerate(reasons) if reason]
        return faults

    def begin(self, step: int = 0, names: Collection[str] | None = None, task: str = "") -> Scoring:
        """Start a `Scoring`: `add` groups as they finish generating, then `finish`. Several may run concurrently.

        `step` is the number of finished steps when the rollouts are trained on (`trainer_state.global_step`).
        `names` are the functions to call; None: all of the task.
        """
        state = SimpleNamespace(global_step=step)
        common = {"max_completion_length": self.max_completion_length, "trainer_state": state}
        common |= {"own_judges": self.own_judges} if self.own_judges else {}
        functions = self._chosen(self._names_of(task) if names is None else names)
        return Scoring(functions, self._pool, common, self._seen_failures)

    def _chosen(self, names: Collection[str] | None) -> list[Function]:
        return [f for f in self.functions.values() if names is None or f.name in names]

    def score(self, rollouts: list[Rollout], step: int = 0) -> list[ScoredRollout]:
        """Return scored rollouts, in order. `reward` is the weighted sum over functions that could score, or NaN."""
        with self.begin(step) as scoring:
            self._last = scoring
            scoring.add(0, rollouts)
            return scoring.finish()

    def metrics(self) -> dict[str, float]:
        """Return `Scoring.metrics` of the last `score`."""
        assert self._last is not None, "`score` has not been called"
        return self._last.metrics()

    def close(self) -> None:
        """Kill the workers. Safe to call twice."""
        self._pool.close()

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
