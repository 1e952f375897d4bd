"""Scoring of rollouts in reward workers, concurrently with generation: how calls are split, repeated and recorded."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import batched, groupby
from typing import Any, NamedTuple

import numpy as np

from megagrpo.platform.process.terminal import get_logger
from megagrpo.rewards.arguments import PER_ROLLOUT, column_of
from megagrpo.rewards.registry.reward_values import MAX_REWARD, Logged, Parts
from megagrpo.rewards.registry.target import Signature, Target
from megagrpo.rewards.workers.pool import Call, Outcome, WorkerPool
from megagrpo.types import PartRewards, Rollout, ScoredRollout

log = get_logger(__name__)
_SHOWN = 1000  # characters of a text shown in a failure report


@dataclass(eq=False)
class Function:
    """One configured reward function. `signature` is the result of `worker.load`; `declared_independent` is the
    config's `independent`."""

    name: str
    target: Target
    weight: float
    args: dict[str, Any]
    timeout: float
    lane: str
    declared_independent: bool = False
    per: str = "trajectory"  # what has a reward: `RewardFunction.per`
    signature: Signature = field(init=False)
    pace: float = 0.0  # seconds per completion in the last call

    @property
    def is_coroutine(self) -> bool:
        return self.signature["is_coroutine"]

    @property
    def is_independent(self) -> bool:
        """Whether the function scores each completion on its own, so that a call may have a part of a group."""
        return self.declared_independent or self.signature["independent"]

    def takes(self, name: str) -> bool:
        """Whether a call gets the argument `name`."""
        return self.signature["open"] or name in self.signature["accepts"]

    def parts(self, rollouts: list[Rollout]) -> Iterator[list[int]]:
        """Yield the indices in `rollouts` for each call: one whole group, in order.

        A part of a group is a call only if the function asks for it (`completions_per_call`), or if the function is
        independent and the group needs more than a quarter of the deadline.
        """
        size = self.signature["completions_per_call"] or len(rollouts)
        if self.is_independent and self.pace and not self.is_coroutine:
            size = min(size, max(1, int(self.timeout / 4 / self.pace)))
        for _, group in groupby(
            range(len(rollouts)), key=lambda i: (rollouts[i].prompt.prompt_id, rollouts[i].prompt.occurrence)
        ):
            yield from map(list, batched(group, size))

    def counts(self, rollouts: Sequence[Rollout]) -> Parts | None:
        """Return what has a reward in each of these completions, and how many; None: the completion itself."""
        if self.per == "turn":
            return "turn", [sum(len(sample.turns) for sample in r.samples) for r in rollouts]
        if self.per == "token":
            return "token", [sum(sample.length for sample in r.samples) for r in rollouts]
        return None

    def deadline(self, count: int) -> float:
        """Timeout in seconds for `count` completions. A call repeatable in smaller parts gets the timeout for one."""
        return self.timeout * (1 if self.is_independent else count)


@dataclass
class FunctionResults:
    """The results of one `function` in one scoring: one value per rollout, what it logged, and counters."""

    function: Function
    values: list[float | None] = field(default_factory=list)
    # per rollout: the rewards of its turns or tokens, whose sum is the value; None: the function gave no such rewards
    rows: list[list[float | None] | None] = field(default_factory=list)
    # per rollout: the columns of `log_extra`, by FUNCTION/column
    extra: list[dict[str, Any]] = field(default_factory=list)
    # per rollout: the numbers that its call logged, by FUNCTION/name
    logged: list[dict[str, float]] = field(default_factory=list)
    timeouts: int = 0
    exceptions: int = 0
    seconds: float = 0.0

    def extend(self, count: int) -> None:
        """Add `count` rollouts that are not scored yet."""
        self.values += [None] * count
        self.rows += [None] * count
        self.extra += [{} for _ in range(count)]
        self.logged += [{} for _ in range(count)]

    def keep_log(self, part: Sequence[int], logged: Logged) -> None:
        """Store what a call logged of the rollouts `part`."""
        for column, cells in logged["columns"].items():
            for i, cell in zip(part, cells, strict=True):
                self.extra[i][f"{self.function.name}/{column}"] = cell
        for i in part:
            self.logged[i] = {f"{self.function.name}/{name}": value for name, value in logged["metrics"].items()}

    def metrics(self) -> dict[str, float]:
        """Return mean and unbiased std over the scored rollouts, and the counters."""
        scored = [v for v in self.values if v is not None]
        mean = statistics.fmean(scored) if scored else math.nan
        return {"mean": mean, "std": statistics.stdev(scored) if len(scored) > 1 else 0.0} | self.counters()

    def counters(self) -> dict[str, float]:
        """Return the numbers that add up over ranks and rounds."""
        return {
            "timeouts": float(self.timeouts),
            "exceptions": float(self.exceptions),
            "unscorable": float(sum(value is None for value in self.values)),
            "seconds": self.seconds,
        }


class Scoring:
    """The scoring of a set of groups: `add` groups as they finish, in any order, and `finish` waits for their rewards.
    A context manager: leaving it early drops the rest.

    `common` are arguments that every function may take. `seen_failures` maps (function, kind of failure) to the reason,
    for failures that were already reported.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        pool: WorkerPool,
        common: dict[str, Any],
        seen_failures: dict[tuple[str, str], str],
    ):
        self._results = [FunctionResults(function) for function in functions]
        self._pool, self._common, self._seen_failures = pool, common, seen_failures
        self._rollouts: list[Rollout] = []  # in the order of `add`
        self._indices: list[int] = []
        self._changed = threading.Condition()  # holds everything here; outcomes come from the pool's thread
        self._open: set[Future[Outcome]] = set()
        self._error: BaseException | None = None  # ends the scoring

    def add(self, index: int, rollouts: list[Rollout]) -> None:
        """Start to score these rollouts; results are sorted by `index`. Thread-safe."""
        with self._changed:
            first = len(self._rollouts)
            self._rollouts += rollouts
            self._indices += [index] * len(rollouts)
            for results in self._results:
                results.extend(len(rollouts))
                for part in results.function.parts(rollouts):
                    self._submit(results, [first + i for i in part])

    def finish(self) -> list[ScoredRollout]:
        """Wait and return one scored rollout per rollout, sorted by index, then in the order of `add`. `reward` is the
        weighted sum over the functions that could score it; NaN if none could.

        Raises the error that ended the workers, if any."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._error is not None)
            if self._error is not None:
                raise self._error
        order = sorted(range(len(self._rollouts)), key=self._indices.__getitem__)
        return [self._scored(i) for i in order]

    def metrics(self) -> dict[str, float]:
        """Return metrics per function, once the scoring is finished: mean and unbiased std over scored completions,
        counts of timeouts, exceptions and unscorable completions, and the workers' seconds."""
        return {f"rewards/{r.function.name}/{name}": v for r in self._results for name, v in r.metrics().items()}

    def counters(self) -> dict[str, float]:
        """Return the `metrics` to sum over ranks and rounds: timeouts, exceptions, unscorable completions, seconds."""
        return {f"rewards/{r.function.name}/{name}": v for r in self._results for name, v in r.counters().items()}

    def drop(self) -> None:
        """Cancel the calls that are not finished."""
        with self._changed:
            dropped, self._open = self._open, set()
        for future in dropped:
            future.cancel()

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    # -- calls

    def _submit(self, results: FunctionResults, part: list[int], is_repeated: bool = False) -> None:
        call = self._call(results.function, part)
        future = self._pool.submit(call)
        self._open.add(future)
        future.add_done_callback(partial(self._ended, call, results, part, is_repeated))

    def _call(self, function: Function, part: list[int]) -> Call:
        chosen = [self._rollouts[i] for i in part]
        columns = {name for r in chosen for name in r.prompt.columns}
        arguments: dict[str, Any] = {name: column_of(chosen, name) for name in columns}
        arguments = {name: values for name, values in (arguments | self._common).items() if function.takes(name)}
        # What the function does not take is not made: the ids of a long response take more time than its text.
        made = {name: make for name, make in PER_ROLLOUT.items() if name == "completions" or function.takes(name)}
        for name in {"trajectories", "own_judges"} - {*function.signature["accepts"]}:  # never through **columns
            made.pop(name, None)
            arguments.pop(name, None)
        arguments |= {name: [make(r) for r in chosen] for name, make in made.items()}
        common = "score", arguments, function.deadline(len(part)), function.lane
        return Call(function.target, function.args, *common, function.counts(chosen))

    def _ended(
        self, call: Call, results: FunctionResults, part: list[int], is_repeated: bool, future: Future[Outcome]
    ) -> None:
        with self._changed:
            if future in self._open:  # else it was dropped
                try:
                    self._record(call, results, part, is_repeated, future.result())
                except BaseException as error:
                    self._error = self._error or error
                self._open.discard(future)
                self._changed.notify_all()

    def _record(
        self, call: Call, results: FunctionResults, part: list[int], is_repeated: bool, outcome: Outcome
    ) -> None:
        """Record one outcome. A failed call is repeated once: one completion at a time if the function is independent,
        else unchanged. A timed-out call is only repeated in smaller parts. A wrong reward count is final."""
        results.seconds += outcome.seconds
        if outcome.kind == "result":
            self._keep(results, part, outcome)
        elif results.function.is_independent and len(part) > 1 and outcome.kind != "invalid":
            for i in part:
                self._submit(results, [i])
        elif not results.function.is_independent and outcome.kind == "error" and not is_repeated:
            self._submit(results, part, is_repeated=True)
        else:
            reason = f"no answer within {call.timeout:g} s" if outcome.kind == "timeout" else outcome.value
            self._failed(results, part, outcome.kind, reason)

    def _keep(self, results: FunctionResults, part: list[int], outcome: Outcome) -> None:
        rewards, logged = outcome.value
        results.function.pace = outcome.seconds / len(part)
        results.keep_log(part, logged)
        for problem in logged["problems"]:
            self._warn_of_log(results.function, problem)
        for i, reward in zip(part, rewards, strict=True):
            row = reward if isinstance(reward, list) else None
            value = reward if row is None else weighted_sum(row, [1.0] * len(row))
            if problem := value if isinstance(value, str) else _too_large(value, results.function.weight):
                self._failed(results, [i], "value", problem)
            else:
                results.values[i], results.rows[i] = value, row

    def _failed(self, results: FunctionResults, part: list[int], kind: str, reason: str) -> None:
        """Count a failure of the completions `part`. A run logs the first of each kind, with the first sample."""
        function, counter = results.function, "timeouts" if kind == "timeout" else "exceptions"
        value = function.signature["value_of_failure"]
        for i in part:
            results.values[i] = value
        setattr(results, counter, getattr(results, counter) + len(part))
        if (function.name, kind) in self._seen_failures:
            return
        self._seen_failures[function.name, kind] = reason
        if len(part) > 1 and kind != "invalid":
            fix = "`independent: true` repeats it one completion at a time: docs/rewards.md"
            reason += f"\n(a failed call costs its group; {fix})"
        rollout = self._rollouts[part[0]]
        sample = {"prompt": rollout.prompt.messages, "completion": rollout.text, **rollout.prompt.columns}
        lines = [f"  {name:<12}{_short(repr(value))}" for name, value in sample.items()]
        log.warning(
            "reward `%s` %s for %d completion(s) of prompt %d (further failures of this kind are only counted, in "
            "%s): %s\n%s",
            function.name,
            "gave no score" if value is None else f"scored {value:g}",
            len(part),
            rollout.prompt.prompt_id,
            f"rewards/{function.name}/{counter}",
            reason,
            "\n".join(lines),
        )

    def _warn_of_log(self, function: Function, problem: str) -> None:
        """Report a wrong use of `log_extra` or `log_metric`, once per run. It changes no reward."""
        counter, _, _ = problem.partition(":")
        if (function.name, counter) not in self._seen_failures:
            self._seen_failures[function.name, counter] = problem
            log.warning(
                "reward `%s`: %s. Its rewards count; nothing is logged under this name for the call",
                function.name,
                problem,
            )

    # -- results

    def _scored(self, i: int) -> ScoredRollout:
        rollout = self._rollouts[i]
        rewards = {t.function.name: t.values[i] for t in self._results}
        weighted = [t.function.weight * value for t in self._results if (value := t.values[i]) is not None]
        if rollout.dialogue is not None:
            above = f"{rollout.prompt.task}/" if rollout.prompt.task else ""
            rewards |= {f"{above}{name}": value for name, value in rollout.dialogue.rewards.items()}
            weighted += [value for value in rollout.dialogue.rewards.values() if value is not None]
        extra = {column: cell for t in self._results for column, cell in t.extra[i].items()}
        logged = {name: value for t in self._results for name, value in t.logged[i].items()}
        functions = [
            (t.function.name, t.function.per, t.function.weight, t.values[i], t.rows[i]) for t in self._results
        ]
        parts = part_rewards(rollout, [Returned(*one) for one in functions])
        return ScoredRollout(rollout, rewards, total(weighted), extra, logged, parts)


def _too_large(value: float | None, weight: float) -> str:
    if value is None or abs(value * weight) <= MAX_REWARD:
        return ""
    return f"it returned {value:g}, which with weight {weight:g} is beyond ±{MAX_REWARD:g}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]} ({len(text)} characters)"


class Returned(NamedTuple):
    """What a reward function returned for a trajectory."""

    name: str
    per: str  # `RewardFunction.per`
    weight: float
    value: float | None  # the reward of the trajectory; None: it could not be scored
    row: (
        list[float | None] | None
    )  # of its turns or tokens, whose sum is `value`; None: the function gave no such rewards


def part_rewards(rollout: Rollout, returned: Sequence[Returned]) -> PartRewards | None:
    """Return the weighted sums of what the functions returned for turns and tokens; None without any."""
    if all(r.row is None for r in returned):
        return None
    whole = [r.weight * r.value for r in returned if r.value is not None and (r.row is None or r.per == "turn")]
    own = {} if rollout.dialogue is None else rollout.dialogue.rewards
    whole += [value for value in own.values() if value is not None]
    by_turn = {r.name: tuple(r.row) for r in returned if r.row is not None and r.per == "turn"}
    turns: tuple[float | None, ...] = ()
    if by_turn:
        weights = [1.0, *(r.weight for r in returned if r.name in by_turn)]
        schedulers = [turn.reward for sample in rollout.samples for turn in sample.turns]
        turns = tuple(weighted_sum(values, weights) for values in zip(schedulers, *by_turn.values(), strict=True))
    rows = [r.weight * np.array(r.row, np.float64) for r in returned if r.row is not None and r.per == "token"]
    return PartRewards(total(whole), by_turn, turns, rollout.spread(_summed(rows), math.nan) if rows else ())


def _summed(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of the rows [n] without their NaN; NaN where all of them are."""
    table = np.stack(rows)
    return np.where(np.isnan(table).all(0), math.nan, np.nansum(table, axis=0))


def weighted_sum(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the weighted sum of the known values; None without any."""
    known = [weight * value for value, weight in zip(values, weights, strict=True) if value is not None]
    return math.fsum(known) if known else None


def total(values: Sequence[float]) -> float:
    """Return the sum; NaN without any value."""
    return math.fsum(values) if values else math.nan
