"""What scores the responses."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from megagrpo.config.section import Count, PositiveInt, Seconds, Section


class RewardFunction(Section):
    function: str
    """A built-in of docs/rewards.md such as `accuracy`; your own as `package.module:function` or `path/file.py:function`; a name that one
    of `rewards.plugins` registers; a reward model as `model:PATH`, or one that is served, as `http://...`."""
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    """What it is called in metrics and completions.jsonl; the last part of `function` when empty."""
    weight: float = 1.0
    """Weight in the sum of rewards."""
    args: dict[str, Any] = {}
    """Keyword arguments passed on every call; for a class, to its constructor."""
    timeout: Seconds | None = None
    """Seconds one completion may take to score; `rewards.timeout` when empty."""
    own_worker: bool = False
    """Give it a process of its own: for a function that holds a model. Reward models have one anyway."""


class RewardsSection(Section):
    functions: list[RewardFunction]
    """Reward functions; the weighted sum is the reward. May be `[]` where a scheduler or an environment of `multi_turn` gives rewards."""
    plugins: list[str] = []
    """Python files that register reward functions under names of their own."""
    timeout: Seconds = 10.0
    """Seconds one completion may take to score; then its worker is killed, the completion gets 0 and is counted in the metrics."""
    workers: Count = 2
    """Worker processes per rank that scores."""
    concurrency: PositiveInt = 16
    """Calls of async functions (LLM judge, served models, your own) under way at once, per rank that scores."""
