"""What scores the responses."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from megagrpo.config.section import PositiveFloat, PositiveInt, Section


class RewardFunction(Section):
    function: str
    """A built-in of docs/rewards.md such as `accuracy`, or your own as `package.module:function` or `path/file.py:function`."""
    weight: float = 1.0
    """Weight in the sum of rewards."""
    args: dict[str, Any] = {}
    """Keyword arguments passed on every call."""


class RewardsSection(Section):
    functions: Annotated[list[RewardFunction], Field(min_length=1)]
    """Reward functions; the weighted sum is the reward."""
    timeout: PositiveFloat = 10.0
    """Seconds one completion may take to score; then its worker is killed, the completion gets 0 and is counted in the metrics."""
    workers: PositiveInt = 2
    """Worker processes per rank that scores."""
