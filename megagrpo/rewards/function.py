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

_FIRST_PART = 32  # completions per call while the function's speed is unknown


@dataclass(eq=False)
class Function:
    """One configured reward function. `signature` is the result of `worker.load`."""

    name: str
    target: Target
    weight: float
    args: dict[str, Any]
    timeout: float
    lane: str
    signature: Signature = field(init=False)
    pace: float = 0.0  # seconds per completion in the last call

    @property
    def is_coroutine(self) -> bool:
        return self.signature["is_coroutine"]

    def parts(self, rollouts: list[Rollout], workers: int) -> Iterator[list[int]]:
        """Yield the indices in `rollouts` for each call.

        A call has as many completions as the function asks for (`completions_per_call`). Without that, a coroutine gets one group per call.
        Other functions get whole groups, up to an even share per worker and to a quarter of the deadline. Only a group longer than that
        quarter is split.
        """
        if wanted := self.signature["completions_per_call"]:
            yield from (list(part) for part in batched(range(len(rollouts)), wanted))
            return
        fits = max(1, int(self.timeout / 4 / self.pace)) if self.pace and not self.is_coroutine else None
        size = 1 if self.is_coroutine else min(math.ceil(len(rollouts) / workers), fits or _FIRST_PART)
        part: list[int] = []
        for _, group in groupby(range(len(rollouts)), key=lambda i: rollouts[i].prompt.prompt_id):
            for members in batched(group, fits or len(rollouts)):
                if part and len(part) + len(members) > size:
                    yield part
                    part = []
                part.extend(members)
        if part:
            yield part


@dataclass
class FunctionResults:
    """The results of one `function` in one scoring: one value per rollout, what it logged, and counters."""

    function: Function
    values: list[float | None] = field(default_factory=list)
    extra: list[dict[str, Any]] = field(default_factory=list)  # per rollout: the columns of `log_extra`, by FUNCTION/column
    logged: list[dict[str, float]] = field(default_factory=list)  # per rollout: the numbers that its call logged, by FUNCTION/name
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
        mean, std = statistics.fmean(scored) if scored else math.nan, statistics.stdev(scored) if len(scored) > 1 else 0.0
        return {"mean": mean, "std": std} | self.counters()

    def counters(self) -> dict[str, float]:
        """Return the numbers that add up over ranks and rounds."""
        return {
            "timeouts": float(self.timeouts),
            "exceptions": float(self.exceptions),
            "unscorable": float(sum(value is None for value in self.values)),
            "seconds": self.seconds,
        }
