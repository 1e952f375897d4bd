"""Scoring of rollouts in reward workers, concurrently with generation."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from megagrpo.platform.process.progress_hook import SILENT_TASK, Task
from megagrpo.platform.process.terminal import get_logger
from megagrpo.rewards.function import Function, FunctionResults
from megagrpo.rewards.workers.pool import Call, Outcome, WorkerPool
from megagrpo.rewards.workers.values import LARGEST
from megagrpo.types import Rollout, ScoredRollout

log = get_logger(__name__)
_SHOWN = 1000  # characters of a text shown in a failure report


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

    def finish(self, task: Task = SILENT_TASK) -> list[ScoredRollout]:
        """Wait and return one scored rollout per rollout, sorted by index, then in the order of `add`. `reward` is the
        weighted sum over the functions that could score it; NaN if none could. `task` counts the calls of functions.

        Raises the error that ended the workers, if any."""

        def has_ended() -> bool:
            task.expect(most, "calls", done=max(0, most - len(self._open)))
            return not self._open or self._error is not None

        with self._changed:
            most = len(self._open)
            self._changed.wait_for(has_ended)
            if self._error is not None:
                raise self._error
        order = sorted(range(len(self._rollouts)), key=self._indices.__getitem__)
        return [self._scored(i) for i in order]

    def metrics(self) -> dict[str, float]:
        """Return metrics per function, once the scoring is finished: mean and unbiased std over scored completions,
        counts of timeouts, exceptions and unscorable completions, and the workers' seconds."""
        return {
            f"rewards/{r.function.name}/{name}": value for r in self._results for name, value in r.metrics().items()
        }

    def counters(self) -> dict[str, float]:
        """Return those of `metrics` that add up over ranks and rounds: timeouts, exceptions, unscorable completions,
        seconds."""
        return {
            f"rewards/{t.function.name}/{name}": value for t in self._results for name, value in t.counters().items()
        }

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
        arguments: dict[str, Any] = {name: [r.prompt.columns.get(name) for r in chosen] for name in columns}
        arguments = {name: values for name, values in (arguments | self._common).items() if function.takes(name)}
        # What the function does not take is not made: the ids of a long response take more time than its text.
        made = {name: make for name, make in _PER_ROLLOUT.items() if name == "completions" or function.takes(name)}
        arguments |= {name: [make(r) for r in chosen] for name, make in made.items()}
        return Call(function.target, function.args, "score", arguments, function.deadline(len(part)), function.lane)

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
        else with the same completions. A call that timed out is only repeated in smaller parts, and a wrong number of
        rewards is final."""
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
        for i, value in zip(part, rewards, strict=True):
            if problem := value if isinstance(value, str) else _too_large(value, results.function.weight):
                self._failed(results, [i], "value", problem)
            else:
                results.values[i] = value

    def _failed(self, results: FunctionResults, part: list[int], kind: str, reason: str) -> None:
        """Count a failure of the completions `part`. The first one of each kind in a run is logged, with the first
        sample."""
        function, counter = results.function, "timeouts" if kind == "timeout" else "exceptions"
        value = function.signature["value_of_failure"]
        for i in part:
            results.values[i] = value
        setattr(results, counter, getattr(results, counter) + len(part))
        if (function.name, kind) in self._seen_failures:
            return
        self._seen_failures[function.name, kind] = reason
        if len(part) > 1 and kind != "invalid":
            reason += (
                "\n(a failed call costs its group; `independent: true` repeats it one completion at a time: "
                "docs/rewards.md)"
            )
        rollout = self._rollouts[part[0]]
        sample = {"prompt": rollout.prompt.messages, "completion": rollout.text, **rollout.prompt.columns}
        log.warning(
            "reward `%s` %s for %d completion(s) of prompt %d (further failures of this kind are only counted, in "
            "rewards/%s/%s): %s\n%s",
            *(
                function.name,
                "gave no score" if value is None else f"scored {value:g}",
                len(part),
                rollout.prompt.prompt_id,
            ),
            *(function.name, counter, reason),
            "\n".join(f"  {name:<12}{_short(repr(value))}" for name, value in sample.items()),
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
            rewards |= rollout.dialogue.rewards
            weighted += [value for value in rollout.dialogue.rewards.values() if value is not None]
        extra = {column: cell for t in self._results for column, cell in t.extra[i].items()}
        logged = {name: value for t in self._results for name, value in t.logged[i].items()}
        return ScoredRollout(rollout, rewards, math.fsum(weighted) if weighted else math.nan, extra, logged)


def _too_large(value: float | None, weight: float) -> str:
    if value is None or abs(value * weight) <= LARGEST:
        return ""
    return f"it returned {value:g}, which with weight {weight:g} is beyond ±{LARGEST:g}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]} ({len(text)} characters)"


def _own_ids(rollout: Rollout) -> list[int]:
    ids = rollout.response_ids
    return list(ids) if rollout.dialogue is None else [t for t, own in zip(ids, rollout.written, strict=True) if own]


def _completion(rollout: Rollout) -> str | list[dict[str, Any]]:
    messages = None if rollout.dialogue is None else list(rollout.dialogue.messages)
    if isinstance(rollout.prompt.messages, str):
        return (
            rollout.text
            if messages is None
            else next(m["content"] for m in reversed(messages) if m["role"] == "assistant")
        )
    return messages or [{"role": "assistant", "content": rollout.text}]


_PER_ROLLOUT: dict[str, Callable[[Rollout], Any]] = {  # arguments of a reward function, one value per rollout
    "prompts": lambda rollout: rollout.prompt.messages,
    "completions": _completion,
    "completion_ids": _own_ids,
    "finish_reason": lambda rollout: rollout.finish_reason,
    "prefixes": lambda rollout: rollout.prompt.opened,
    "is_truncated": lambda rollout: rollout.finish_reason == "length",
}
