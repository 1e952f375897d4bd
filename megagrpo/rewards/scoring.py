"""The scoring of one step's rollouts, which goes on in a thread of its own while more of them are generated."""

from __future__ import annotations

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from megagrpo.rewards.feed import Aborted, Feed
from megagrpo.rewards.function import Function
from megagrpo.rewards.pool import Call, Outcome, WorkerPool
from megagrpo.types import Rollout, ScoredRollout

log = logging.getLogger(__name__)
_SHOWN = 1000  # characters of a text that a report of a failure shows


class Scoring:
    """`add` groups of rollouts as they come, in any order; `finish` waits for their rewards. Leaving the `with` before drops all."""

    def __init__(
        self,
        functions: list[Function],
        pool: WorkerPool,
        thread: ThreadPoolExecutor,
        max_completion_length: int,
        step: int,
        seen_failures: set[tuple[str, str]],
    ):
        self._functions, self._pool = functions, pool
        self._common = {"max_completion_length": max_completion_length, "trainer_state": SimpleNamespace(global_step=step)}
        self._seen_failures = seen_failures
        self._rollouts: list[Rollout] = []  # in the order in which they came
        self._places: list[int] = []
        self._feed = Feed(self._calls)
        self._run = thread.submit(pool.run, [], self._done, self._feed)

    def add(self, place: int, rollouts: list[Rollout]) -> None:
        """Start to score these; `place` orders them among the results."""
        self._feed.put((place, rollouts))

    def finish(self) -> list[ScoredRollout]:
        """One scored rollout per rollout, by place, then as added. `reward` is the weighted sum over the functions that could score it; NaN
        when none could."""
        self._feed.end()
        self._run.result()
        order = sorted(range(len(self._rollouts)), key=self._places.__getitem__)
        return [self._scored(i) for i in order]

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._run.done():
            self._feed.end(abort=True)
        if not isinstance(self._run.exception(), Aborted | None):
            raise self._run.exception()
        self._feed.close()

    # -- in the thread of the pool

    def _calls(self, item: tuple[int, list[Rollout]]) -> list[Call]:
        """The calls that score what was added."""
        place, rollouts = item
        first = len(self._rollouts)
        self._rollouts += rollouts
        self._places += [place] * len(rollouts)
        for function in self._functions:
            function.values += [None] * len(rollouts)
        return [
            self._call(function, [first + i for i in part])
            for function in self._functions
            for part in function.parts(rollouts, self._pool.size(function.lane))
        ]

    def _call(self, function: Function, part: list[int]) -> Call:
        chosen = [self._rollouts[i] for i in part]
        columns = {name for r in chosen for name in r.prompt.columns}
        arguments: dict[str, Any] = {name: [r.prompt.columns.get(name) for r in chosen] for name in columns}
        arguments |= self._common | {
            "prompts": [r.prompt.messages for r in chosen],
            "completions": [_completion(r) for r in chosen],
            "completion_ids": [[t for t, own in zip(r.response_ids, r.written, strict=True) if own] for r in chosen],
            "finish_reason": [r.finish_reason for r in chosen],
            "is_truncated": [r.finish_reason == "length" for r in chosen],
        }
        return Call(function.target, function.args, "score", arguments, function.timeout, function.lane, tag=(function, part))

    def _done(self, call: Call, outcome: Outcome) -> list[Call]:
        """Take in one outcome. A part that failed is called again one by one, to lose no more than the culprit."""
        function, part = call.tag
        function.seconds += outcome.seconds
        if outcome.kind == "result":
            function.pace = outcome.seconds / len(part)
            for i, value in zip(part, outcome.value, strict=True):
                function.values[i] = value
                if value is not None and math.isnan(value):
                    self._failed(function, i, "exceptions", "it gave no finite number")
            return []
        if len(part) > 1:
            return [self._call(function, [i]) for i in part]
        self._failed(function, part[0], "timeouts" if outcome.kind == "timeout" else "exceptions", outcome.value)
        return []

    def _failed(self, function: Function, i: int, counter: str, reason: str) -> None:
        """Count a failure; the first of its kind in the run is shown, with the sample that caused it."""
        function.values[i] = function.signature["value_of_failure"]
        setattr(function, counter, getattr(function, counter) + 1)
        if (function.name, counter) in self._seen_failures:
            return
        self._seen_failures.add((function.name, counter))
        rollout = self._rollouts[i]
        sample = {"prompt": rollout.prompt.messages, "completion": rollout.text, **rollout.prompt.columns}
        given = "was left out" if function.values[i] is None else f"scored {function.values[i]:g}"
        log.warning(
            "reward `%s` %s for prompt %d (more of the kind are only counted, in rewards/%s/%s): %s\n%s",
            *(function.name, given, rollout.prompt.prompt_id, function.name, counter, reason),
            "\n".join(f"  {name:<12}{_short(repr(value))}" for name, value in sample.items()),
        )

    # -- in the caller's

    def _scored(self, i: int) -> ScoredRollout:
        rollout = self._rollouts[i]
        rewards = {f.name: f.values[i] for f in self._functions}
        weighted = [f.weight * f.values[i] for f in self._functions if f.values[i] is not None]
        if rollout.dialogue is not None:
            rewards |= rollout.dialogue.rewards
            weighted += [value for value in rollout.dialogue.rewards.values() if value is not None]
        return ScoredRollout(rollout, rewards, math.fsum(weighted) if weighted else math.nan)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]} ({len(text)} characters)"


def _completion(rollout: Rollout) -> str | list[dict[str, Any]]:
    messages = None if rollout.dialogue is None else list(rollout.dialogue.messages)
    if isinstance(rollout.prompt.messages, str):
        return rollout.text if messages is None else next(m["content"] for m in reversed(messages) if m["role"] == "assistant")
    return messages or [{"role": "assistant", "content": rollout.text}]
