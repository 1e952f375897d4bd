"""Rollouts in, scored rollouts out: runs the configured reward functions in workers and adds up what they give."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import batched, groupby
from pathlib import Path
from typing import Any

from megagrpo.config import RewardsSection
from megagrpo.rewards.pool import Call, Outcome, WorkerPool
from megagrpo.rewards.registry import Target, did_you_mean, display_names, resolve
from megagrpo.types import Rollout, ScoredRollout

log = logging.getLogger(__name__)
_FIRST_PART = 32  # completions in a call while the pace of the function is unknown


@dataclass
class _Function:
    """A configured reward function, and what was counted in the last call of `score`."""

    name: str
    target: Target
    weight: float
    args: dict[str, Any]
    needs: tuple[tuple[str, ...], ...] = ()
    pace: float = 0.0  # seconds per completion, as last seen
    values: list[float | None] = field(default_factory=list)
    timeouts: int = 0
    exceptions: int = 0
    seconds: float = 0.0


class RewardScorer:
    """Runs `rewards.functions` on rollouts, in `rewards.workers` processes, `rewards.timeout` seconds per completion.

    A function is called with keywords as in TRL: `prompts`, `completions`, `completion_ids`, every data set column, its own `args`, and
    `finish_reasons` and `max_completion_length`, of which it gets those it accepts. For a prompt that is a list of messages the
    completion is a list with one assistant message, or of several turns with all that followed the prompt; for a string prompt it is
    a string, of several turns the policy's last message. `completion_ids` are the tokens that the policy wrote. It gives one number,
    or None for "cannot score", per completion. It sees a part of the batch at a time: whole groups while it is fast, single
    completions when a part failed or it is too slow for more. What raises, hangs, or gives no finite number scores 0 and is counted.

    Functions are loaded in the workers, here at construction: ValueError for an unknown name, a function that cannot be imported, or
    an argument it does not take. `base_folder` is where relative .py files and modules are looked for after the current folder.
    Call `close` at the end (or use `with`)."""

    def __init__(self, section: RewardsSection, max_completion_length: int, base_folder: str | Path | None = None):
        names = display_names([f.function for f in section.functions])
        targets = [resolve(f.function, base_folder) for f in section.functions]
        self._functions = [_Function(n, t, f.weight, f.args) for n, t, f in zip(names, targets, section.functions, strict=True)]
        self._timeout = section.timeout
        self._max_completion_length = max_completion_length
        self._seconds = 0.0
        self._pool = WorkerPool(section.workers, None if base_folder is None else str(Path(base_folder).resolve()))
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        """Names of the functions in configured order: the keys of `ScoredRollout.rewards`."""
        return [f.name for f in self._functions]

    def _load(self) -> None:
        """Import every function once and check its arguments; all problems at once."""
        problems: list[str] = []

        def described(call: Call, outcome: Outcome) -> list[Call]:
            function = self._functions[call.tag]
            if outcome.kind == "result":
                problems.extend(_argument_problems(function, call.tag, outcome.value))
                needs = outcome.value["needs"]
                function.needs = tuple(alternatives for alternatives in needs if set(alternatives).isdisjoint(function.args))
            else:
                problems.append(f"rewards.functions[{call.tag}]: `{function.name}` cannot be loaded: {outcome.value}")
            return []

        calls = [Call(f.target, action="describe", tag=i) for i, f in enumerate(self._functions)]
        self._pool.run(calls, self._timeout, described)
        if problems:
            raise ValueError("\n".join(sorted(problems)))

    def check_columns(self, columns: Iterable[str]) -> None:
        """ValueError when a function needs a column that is not in `columns`, the data set's names after renaming."""
        present = list(columns)
        problems = [
            f"rewards.functions: reward `{function.name}` wants column {' or '.join(f'`{name}`' for name in alternatives)}; "
            f"the data set has {', '.join(present)}{did_you_mean(alternatives[0], present)}; rename with data.columns"
            for function in self._functions
            for alternatives in function.needs
            if set(alternatives).isdisjoint(present)
        ]
        if problems:
            raise ValueError("\n".join(problems))

    def score(self, rollouts: list[Rollout]) -> list[ScoredRollout]:
        """One scored rollout per rollout, in order. `reward` is the weighted sum over the functions that could score; NaN if none could."""
        begun = time.perf_counter()
        for function in self._functions:
            function.values, function.timeouts, function.exceptions, function.seconds = [None] * len(rollouts), 0, 0, 0.0
        calls = [self._call(f, rollouts, part) for f in self._functions for part in self._parts(f, rollouts)]
        self._pool.run(calls, self._timeout, lambda call, outcome: self._done(rollouts, call, outcome))
        self._seconds = time.perf_counter() - begun
        return [self._scored(rollout, i) for i, rollout in enumerate(rollouts)]

    def _parts(self, function: _Function, rollouts: list[Rollout]) -> Iterator[list[int]]:
        """Indices of the rollouts of each call: whole groups up to an even share per worker, and what takes a quarter of the deadline.

        Only a group that takes longer is cut."""
        fits = max(1, int(self._timeout / 4 / function.pace)) if function.pace else None
        size = min(math.ceil(len(rollouts) / len(self._pool)), fits or _FIRST_PART)
        part: list[int] = []
        for _, group in groupby(range(len(rollouts)), key=lambda i: rollouts[i].prompt.prompt_id):
            for members in batched(group, fits or len(rollouts)):
                if part and len(part) + len(members) > size:
                    yield part
                    part = []
                part.extend(members)
        if part:
            yield part

    def _call(self, function: _Function, rollouts: list[Rollout], part: list[int]) -> Call:
        chosen = [rollouts[i] for i in part]
        columns = {name for r in chosen for name in r.prompt.columns}
        arguments = {name: [r.prompt.columns.get(name) for r in chosen] for name in columns}
        arguments |= {
            "prompts": [r.prompt.messages for r in chosen],
            "completions": [_completion(r) for r in chosen],
            "completion_ids": [[t for t, own in zip(r.response_ids, r.written, strict=True) if own] for r in chosen],
            "finish_reasons": [r.finish_reason for r in chosen],
            "max_completion_length": self._max_completion_length,
        }
        return Call(function.target, arguments=arguments | function.args, tag=(function, part))

    def _done(self, rollouts: list[Rollout], call: Call, outcome: Outcome) -> list[Call]:
        """Take in one outcome. A part that failed is called again one by one, to lose no more than the culprit."""
        function, part = call.tag
        function.seconds += outcome.seconds
        if outcome.kind == "result":
            function.pace = outcome.seconds / len(part)
            for i, value in zip(part, outcome.value, strict=True):
                if value is not None and math.isnan(value):
                    self._failed(function, rollouts[i], "exceptions", "it gave no finite number")
                function.values[i] = 0.0 if value is not None and math.isnan(value) else value
            return []
        if len(part) > 1:
            return [self._call(function, rollouts, [i]) for i in part]
        function.values[part[0]] = 0.0
        self._failed(function, rollouts[part[0]], "timeouts" if outcome.kind == "timeout" else "exceptions", outcome.value)
        return []

    def _failed(self, function: _Function, rollout: Rollout, counter: str, reason: str) -> None:
        """Count a failure; the first of its kind in this call is logged."""
        setattr(function, counter, getattr(function, counter) + 1)
        if getattr(function, counter) == 1:
            log.warning(
                "reward `%s` scored 0 for prompt %d: %s; completion: %.200r", function.name, rollout.prompt.prompt_id, reason, rollout.text
            )

    def _scored(self, rollout: Rollout, i: int) -> ScoredRollout:
        rewards = {f.name: f.values[i] for f in self._functions}
        weighted = [f.weight * f.values[i] for f in self._functions if f.values[i] is not None]
        if rollout.dialogue is not None:
            rewards |= rollout.dialogue.rewards
            weighted += [value for value in rollout.dialogue.rewards.values() if value is not None]
        return ScoredRollout(rollout, rewards, math.fsum(weighted) if weighted else math.nan)

    def metrics(self) -> dict[str, float]:
        """Of the last `score`: per function mean and unbiased std (over what it could score), counts of timeouts, exceptions and
        completions it could not score, its worker seconds; and the seconds of the whole call."""
        metrics = {"rewards/seconds": self._seconds}
        for function in self._functions:
            scored = [v for v in function.values if v is not None]
            metrics |= {
                f"rewards/{function.name}/mean": statistics.fmean(scored) if scored else math.nan,
                f"rewards/{function.name}/std": statistics.stdev(scored) if len(scored) > 1 else 0.0,
                f"rewards/{function.name}/timeouts": float(function.timeouts),
                f"rewards/{function.name}/exceptions": float(function.exceptions),
                f"rewards/{function.name}/unscorable": float(len(function.values) - len(scored)),
                f"rewards/{function.name}/seconds": function.seconds,
            }
        return metrics

    def close(self) -> None:
        """Kill the workers. Safe to call twice."""
        self._pool.close()

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _completion(rollout: Rollout) -> str | list[dict[str, Any]]:
    messages = None if rollout.dialogue is None else list(rollout.dialogue.messages)
    if isinstance(rollout.prompt.messages, str):
        return rollout.text if messages is None else next(m["content"] for m in reversed(messages) if m["role"] == "assistant")
    return messages or [{"role": "assistant", "content": rollout.text}]


def _argument_problems(function: _Function, index: int, signature: dict[str, Any]) -> list[str]:
    if signature["open"]:
        return []
    return [
        f"rewards.functions[{index}].args.{name}: `{function.name}` has no such argument{did_you_mean(name, signature['accepts'])}; "
        f"it takes {', '.join(signature['accepts'])}"
        for name in function.args
        if name not in signature["accepts"]
    ]
