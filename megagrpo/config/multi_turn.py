"""Defines the section `multi_turn`: schedulers, tools and environments that answer the policy, and their limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from megagrpo.config.problems import Problem
from megagrpo.config.section import Count, PositiveInt, Seconds, Section

# the keys that make a response have several turns
ANSWERING = ("multi_turn.scheduler", "multi_turn.tools", "multi_turn.environment")
LIMITS = ("multi_turn.max_response_length", "multi_turn.completion_length_limit_scope")


class MultiTurnSection(Section):
    scheduler: str | None = None
    """Decides after each turn how the conversation continues: `math_tip_trick`, `math_tip_trick_multi_turn`,
    `reasoning_gym`, or your function or class as `package.module:name` or `path/file.py:name` (docs/multi_turn.md)."""
    scheduler_args: dict[str, Any] = {}
    """Keyword arguments of the scheduler, passed on every call."""
    tools: list[str] = []
    """Functions that the policy calls: `calculator`, or yours: `package.module:function` or `path/file.py:function`."""
    environment: str | None = None
    """Class `package.module:Class` or `path/file.py:Class`: each response has an instance; public methods are tools."""
    tool_parser: Annotated[str, Field(pattern=r"^(hermes|vllm:[a-z0-9_]+)$")] = "hermes"
    """Parser of tool calls: `hermes`, JSON between <tool_call> and </tool_call>, or `vllm:NAME`, a parser of vLLM
    (`--tool-call-parser`)."""
    max_turns: PositiveInt | None = None
    """Turns that the policy may take in one response; as many as fit when empty."""
    max_tool_calling_iterations: PositiveInt | None = None
    """Turns of one response whose tool calls are executed; as many as fit when empty."""
    completion_length_limit_scope: Literal["total", "per_round"] = "total"
    """What `rollout.max_completion_length` limits, in tokens. total: the whole response, messages of tools and
    schedulers included.
    per_round: each turn of the policy."""
    max_response_length: PositiveInt | None = None
    """Longest whole response in tokens, with `completion_length_limit_scope: per_round`."""
    timeout: Seconds = 10.0
    """Timeout in seconds of a tool, scheduler or environment call. Then its process is killed and a failure counted."""
    workers: Count = 4
    """Worker processes for tools, schedulers and environments, per rank that generates."""

    @property
    def enabled(self) -> bool:
        """Whether responses can have more than one turn."""
        return bool(self.scheduler or self.tools or self.environment)

    @property
    def vllm_parser(self) -> str | None:
        """vLLM's parser, with which servers are started; None when the trainer parses calls itself."""
        return self.tool_parser.removeprefix("vllm:") if self.tool_parser.startswith("vllm:") else None


def multi_turn_problems(m: MultiTurnSection) -> Iterator[Problem]:
    """Yield options that have no effect, or contradict each other."""
    set_keys = m.model_fields_set - {"scheduler", "tools", "environment"}
    fields = MultiTurnSection.model_fields
    idle = [name for name in fields if name in set_keys and getattr(m, name) != fields[name].default]
    if not m.enabled:
        reason = "has no effect without a scheduler, tools or an environment; name one, or leave this out"
        yield from (Problem((f"multi_turn.{name}", *ANSWERING), reason) for name in idle)
        return
    if m.scheduler_args and m.scheduler is None:
        reason = "needs a scheduler; set multi_turn.scheduler, or leave scheduler_args out"
        yield Problem(("multi_turn.scheduler_args", "multi_turn.scheduler"), reason)
    for name in ("max_tool_calling_iterations", "tool_parser"):
        if name in idle and not (m.tools or m.environment):
            keys = (f"multi_turn.{name}", "multi_turn.tools", "multi_turn.environment")
            yield Problem(keys, f"{getattr(m, name)} needs tools; name tools or an environment, or leave it out")
    if m.completion_length_limit_scope == "per_round" and m.max_response_length is None:
        reason = "completion_length_limit_scope per_round needs a limit for the whole response; set one, in tokens"
        yield Problem(LIMITS, reason)
    if m.completion_length_limit_scope == "total" and m.max_response_length is not None:
        reason = "with completion_length_limit_scope total, rollout.max_completion_length limits the whole response"
        yield Problem(LIMITS, f"{reason}; leave it out, or set the scope to per_round")
