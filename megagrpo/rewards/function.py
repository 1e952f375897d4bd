"""A configured reward function as the scorer sees it: how to split its calls, and the results of one scoring."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched, groupby
from typing import Any

from megagrpo.rewards.target import Signature, Target
from megagrpo.rewards.workers.call_log import Logged
from megagrpo.types import Rollout


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

    def deadline(self, count: int) -> float:
        """Timeout in seconds of a call with `count` completions. A call that may be repeated in smaller parts gets no
        more than for one."""
        return self.timeout * (1 if self.is_independent else count)


@dataclass
class FunctionResults:
    """The results of one `function` in one scoring: one value per rollout, what it logged, and counters."""

    function: Function
    values: list[float | None] = field(default_factory=list)
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
        mean, std = (
            statistics.fmean(scored) if scored else math.nan,
            statistics.stdev(scored) if len(scored) > 1 else 0.0,
        )
        return {"mean": mean, "std": std} | self.counters()

    def counters(self) -> dict[str, float]:
        """Return the numbers that add up over ranks and rounds."""
        return {
            "timeouts": float(self.timeouts),
            "exceptions": float(self.exceptions),
            "unscorable": float(sum(value is None for value in self.values)),
            "seconds": self.seconds,
        }
