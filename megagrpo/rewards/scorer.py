"""Rollouts in, scored rollouts out: runs the configured reward functions in workers and adds up what they give."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from megagrpo.config import RewardsSection
from megagrpo.rewards.function import Function
from megagrpo.rewards.registry import display_names, resolve
from megagrpo.rewards.scoring import Scoring, Work
from megagrpo.rewards.target import did_you_mean
from megagrpo.rewards.workers.pool import SHARED, Call, Outcome, WorkerPool
from megagrpo.types import Rollout, ScoredRollout

COROUTINES = "coroutines"  # the lane of one worker that runs many calls of async functions at once


class RewardScorer:
    """Runs `rewards.functions` on rollouts in worker processes, each call with a deadline.

    A function is called with keywords as in TRL: `prompts`, `completions`, `completion_ids`, every data set column, its own `args`, and
    `finish_reason`, `is_truncated`, `max_completion_length` and `trainer_state` (`.global_step`), of which it gets those it accepts. For a
    prompt that is a list of messages the completion is a list with one assistant message, or of several turns with all that followed the
    prompt; for a string prompt it is a string, of several turns the policy's last message. `completion_ids` are the tokens that the policy
    wrote. It gives one number, or None for "cannot score", per completion. It sees a part of the batch at a time: whole groups while it is
    fast, single completions when a part failed or it is too slow for more. What raises, hangs, or gives no finite number scores 0 and is
    counted.

    Plain functions share `rewards.workers` processes; async ones run concurrently in one more, up to `rewards.concurrency` calls; reward
    models and functions with `own_worker` have a process each. All are loaded here at construction: ValueError for an unknown name, a
    function that cannot be imported, or an argument it does not take. `base_folder` is where modules are looked for
    after the current folder. Call `close` at the end (or use `with`)."""

    def __init__(self, section: RewardsSection, max_completion_length: int, base_folder: str | Path | None = None):
        names = display_names(section.functions)
        targets = [resolve(f.function, section.plugins) for f in section.functions]
        self._functions = [
            Function(name, target, f.weight, f.args, f.timeout or section.timeout, f"own {i}" if f.own_worker or target.heavy else SHARED)
            for i, (name, target, f) in enumerate(zip(names, targets, section.functions, strict=True))
        ]
        self._max_completion_length, self._concurrency = max_completion_length, section.concurrency
        self._seen_failures: dict[tuple[str, str], str] = {}
        # The kernel kills a worker when the thread that started it ends, so one thread starts them all and lives as long as they do.
        self._thread = ThreadPoolExecutor(1, "rewards")
        folder = None if base_folder is None else str(Path(base_folder).resolve())
        self._pool = self._thread.submit(WorkerPool, section.workers, folder).result()
        self._work: Work | None = None
        self._last: Scoring | None = None
        try:
            self._thread.submit(self._load).result()
        except BaseException:
            self.close()
            raise
        self._work = Work(self._pool, self._thread)

    @property
    def names(self) -> list[str]:
        """Names of the functions in configured order: the keys of `ScoredRollout.rewards`."""
        return [f.name for f in self._functions]

    @property
    def tracebacks(self) -> dict[str, str]:
        """The first traceback of each function that has raised, by its name."""
        return {name: reason for (name, counter), reason in self._seen_failures.items() if counter == "exceptions"}

    def _load(self) -> None:
        """Import every function once and check its arguments; all problems at once. Async functions are loaded where they will run too."""
        for function in self._functions:
            if function.lane != SHARED:
                self._pool.add_lane(function.lane)
        self._describe(self._functions)
        coroutines = [f for f in self._functions if f.is_coroutine]
        for i, function in enumerate(self._functions):
            if function.is_coroutine and function.lane != SHARED:
                raise ValueError(f"rewards.functions[{i}].own_worker: `{function.name}` is async and shares a worker; remove own_worker")
        if coroutines:
            self._pool.add_lane(COROUTINES, capacity=self._concurrency)
            for function in coroutines:
                function.lane = COROUTINES
            self._describe(coroutines)

    def _describe(self, functions: list[Function]) -> None:
        problems: list[str] = []

        def described(call: Call, outcome: Outcome) -> list[Call]:
            function, index = call.tag, self._functions.index(call.tag)
            if outcome.kind != "result":
                problems.append(f"rewards.functions[{index}]: `{function.name}` cannot be loaded: {outcome.value}")
                return []
            function.signature = outcome.value
            problems.extend(
                f"rewards.functions[{index}].args.{name}: `{function.name}` has no such argument"
                f"{did_you_mean(name, function.signature['options'])}; it takes {', '.join(function.signature['options'])}"
                for name in function.signature["unknown"]
            )
            return []

        self._pool.run([Call(f.target, f.args, action="describe", timeout=f.timeout, lane=f.lane, tag=f) for f in functions], described)
        if problems:
            raise ValueError("\n".join(sorted(problems)))

    def check_columns(self, columns: Iterable[str]) -> None:
        """ValueError when a function needs a column that is not in `columns`, the data set's names after renaming."""
        present = list(columns)
        problems = [
            f"rewards.functions: reward `{function.name}` wants column {' or '.join(f'`{name}`' for name in alternatives)}; "
            f"the data set has {', '.join(present)}{did_you_mean(alternatives[0], present)}; rename with data.columns"
            for function in self._functions
            for alternatives in function.signature["needs"]
            if set(alternatives).isdisjoint(present)
        ]
        if problems:
            raise ValueError("\n".join(problems))

    def begin(self, step: int = 0) -> Scoring:
        """Scoring that goes on while rollouts are still generated: `add` them as they come, then `finish`. Several may go on at once.

        `step` is how many outer iterations are finished when the rollouts are trained on, for functions that follow the run."""
        common = {"max_completion_length": self._max_completion_length, "trainer_state": SimpleNamespace(global_step=step)}
        return Scoring(self._functions, self._work, common, self._seen_failures)

    def score(self, rollouts: list[Rollout], step: int = 0) -> list[ScoredRollout]:
        """One scored rollout per rollout, in order. `reward` is the weighted sum over the functions that could score; NaN if none could."""
        with self.begin(step) as self._last:
            self._last.add(0, rollouts)
            return self._last.finish()

    def metrics(self) -> dict[str, float]:
        """`Scoring.metrics` of the last `score`."""
        return self._last.metrics()

    def close(self) -> None:
        """Kill the workers. Safe to call twice."""
        if self._work is not None:
            self._work.close()
            self._work = None
        self._pool.close()
        self._thread.shutdown()

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
