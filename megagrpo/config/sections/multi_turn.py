"""Defines the section `multi_turn`: schedulers, tools and environments that answer the policy, and their limits."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, field_validator

from megagrpo.config.basics.problems import Problem
from megagrpo.config.sections.section import Count, NonNegativeInt, PositiveInt, Seconds, Section

_ROLE = re.compile(r"[A-Za-z][\w-]{0,63}", re.ASCII)
MAX_WEIGHT = 1e6  # of a role, and of a task in the loss: products stay finite
# the keys that make a response have several turns
ANSWERING = ("multi_turn.scheduler", "multi_turn.tools", "multi_turn.environment", "multi_turn.agent")


class MultiTurnSection(Section):
    scheduler: str | None = None
    """Decides after each turn how the conversation continues: `math_tip_trick`, `math_tip_trick_multi_turn`,
    `reasoning_gym`, or your function or class as `package.module:name` or `path/file.py:name` (docs/multi_turn.md)."""
    scheduler_args: dict[str, Any] = {}
    """Keyword arguments of the scheduler, passed on every call."""
    tools: list[str] = []
    """Functions that the policy calls: `calculator`, `mcp:COMMAND`, all tools of an MCP server, or yours:
    `package.module:function` or `path/file.py:function`."""
    environment: str | None = None
    """Class `package.module:Class` or `path/file.py:Class`: each response has an instance; public methods are tools.
    Environments of other projects: docs/environments.md."""
    environment_args: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    reuse_environments: bool = False
    """Whether a process of an environment serves another response after `reset`, instead of being killed. A process
    whose response failed is killed."""
    container: str | None = None
    """Command that starts the process of an environment, such as `docker run --rm -i IMAGE {command}`.
    docs/environments.md lists the placeholders."""
    python: str | None = None
    """Python of the worker processes, such as `/opt/verifiers/bin/python`: a virtual environment for packages that do
    not fit vLLM's."""
    agent: str | dict[str, Any] | None = None
    """Function `package.module:function` or `path/file.py:function`, `async` or not, that talks to the policy at an
    OpenAI-compatible address and returns the reward. Or a mapping: `function`, and `roles` with the weight of each one
    in the loss (docs/agents.md), or a `command`, which may run in a container (docs/containers.md)."""
    tool_parser: Annotated[str, Field(pattern=r"^(hermes|vllm:[a-z0-9_]+)$")] = "hermes"
    """Parser of tool calls: `hermes`, JSON between <tool_call> and </tool_call>, or `vllm:NAME`, a parser of vLLM
    (`--tool-call-parser`)."""
    max_turns: PositiveInt | None = None
    """Turns that the policy may take in one response; as many as fit when empty."""
    max_tool_calling_iterations: PositiveInt | None = None
    """Turns of one response whose tool calls are executed; as many as fit when empty."""
    max_seconds: Seconds | None = None
    """Seconds that one response may take, tools included. Then it ends with the turns that are complete. An agent's
    process is then killed; without this key after 600 s."""
    max_result_chars: PositiveInt | None = 200_000
    """Longest result of a tool in characters. The middle of a longer one is left out. Unlimited when empty."""
    retries: NonNegativeInt = 0
    """Attempts at a response after the first one fails, each with a new environment and the same seeds."""
    max_response_length: PositiveInt | None = None
    """Longest whole response in tokens, messages of tools and schedulers included; `rollout.max_completion_length`
    then limits each turn of the policy. Empty: `rollout.max_completion_length` limits the whole response."""
    timeout: Seconds = 10.0
    """Timeout in seconds of a tool, scheduler or environment call. Then its process is killed and a failure counted.
    An environment's `close` gets as long."""
    workers: Count = 4
    """Worker processes for tools, schedulers, environments and agents, per rank that generates. For an agent each has
    up to 64 conversations at once, in processes forked from it."""

    @field_validator("agent")
    @classmethod
    def _is_agent(cls, agent: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        if not isinstance(agent, dict):
            return agent
        if isinstance(agent.get("function"), str) == bool(agent.get("command")):
            raise ValueError("must be the agent's function, or a mapping with `function` or `command`")
        if "roles" not in agent:
            return agent
        roles = agent["roles"]
        if not isinstance(roles, dict) or not all(isinstance(name, str) and _ROLE.fullmatch(name) for name in roles):
            raise ValueError("roles must map names of letters, digits, _ and - to weights, as in {solver: 1.0}")
        for name, weight in roles.items():
            if type(weight) not in (int, float) or not 0 <= weight <= MAX_WEIGHT:
                raise ValueError(f"roles.{name}: {weight!r} is no weight; give a number from 0 to {MAX_WEIGHT:g}")
        if not any(roles.values()):
            raise ValueError("roles: no role has a weight above 0, so nothing is trained; raise one")
        return agent

    @property
    def roles(self) -> dict[str, float]:
        """The weight in the loss of each of the agent's roles; empty without roles."""
        return self.agent.get("roles", {}) if isinstance(self.agent, dict) else {}

    @property
    def enabled(self) -> bool:
        """Whether responses can have more than one turn."""
        return bool(self.scheduler or self.tools or self.environment or self.agent)

    @property
    def vllm_parser(self) -> str | None:
        """vLLM's parser, with which servers are started; None when the trainer parses calls itself."""
        return self.tool_parser.removeprefix("vllm:") if self.tool_parser.startswith("vllm:") else None


def multi_turn_problems(m: MultiTurnSection) -> Iterator[Problem]:
    """Yield options that have no effect, or contradict each other."""
    set_keys = m.model_fields_set - {"scheduler", "tools", "environment", "agent"}
    fields = MultiTurnSection.model_fields
    idle = [name for name in fields if name in set_keys and getattr(m, name) != fields[name].default]
    if not m.enabled:
        reason = "has no effect without a scheduler, tools, an environment or an agent; name one, or leave this out"
        yield from (Problem((f"multi_turn.{name}", *ANSWERING), reason) for name in idle)
        return
    yield from _agent_problems(m, idle)
    if m.scheduler_args and m.scheduler is None:
        reason = "needs a scheduler; set multi_turn.scheduler, or leave scheduler_args out"
        yield Problem(("multi_turn.scheduler_args", "multi_turn.scheduler"), reason)
    for name in ("environment_args", "reuse_environments", "container"):
        if name in idle and m.environment is None:
            reason = f"needs an environment; set multi_turn.environment, or leave {name} out"
            yield Problem((f"multi_turn.{name}", "multi_turn.environment"), reason)
    if m.container is not None:
        yield from _container_problems(m, m.container)
    for name in ("max_tool_calling_iterations", "max_result_chars", "tool_parser"):
        if name in idle and not (m.tools or m.environment or m.agent):
            keys = (f"multi_turn.{name}", "multi_turn.tools", "multi_turn.environment")
            yield Problem(keys, f"{getattr(m, name)} needs tools; name tools or an environment, or leave it out")
    if m.retries and not (m.scheduler or m.environment or m.agent):
        reason = f"{m.retries} needs a scheduler, an environment or an agent: the failure of a tool ends no response"
        yield Problem(("multi_turn.retries", *ANSWERING), f"{reason}; leave it out")


def _agent_problems(m: MultiTurnSection, idle: list[str]) -> Iterator[Problem]:
    """Yield what an agent excludes: it decides itself who answers the policy, and how often."""
    if m.agent is None:
        return
    for name in ("scheduler", "tools", "environment"):
        if getattr(m, name):
            keys = ("multi_turn.agent", f"multi_turn.{name}")
            yield Problem(keys, f"an agent answers the policy itself; leave out multi_turn.agent or multi_turn.{name}")
    for name in ("max_tool_calling_iterations", "max_result_chars", "timeout"):
        if name in idle:
            reason = "has no effect on an agent, which calls its tools itself; set multi_turn.max_turns or max_seconds"
            yield Problem((f"multi_turn.{name}", "multi_turn.agent"), reason)


def _container_problems(m: MultiTurnSection, template: str) -> Iterator[Problem]:
    try:
        words = shlex.split(template)
    except ValueError as error:
        yield Problem(("multi_turn.container",), f"cannot be split into words: {error}; close the quote")
        return
    if "{command}" not in words and not any("{module}" in word for word in words):
        reason = "starts no environment; put {command} where the image's command goes, as in docker run --rm -i IMAGE"
        yield Problem(("multi_turn.container",), f"{reason} {{command}}, or write python -m {{module}}")
    if m.scheduler is not None:
        keys = ("multi_turn.container", "multi_turn.scheduler")
        yield Problem(keys, "holds the environment only; leave the scheduler out, and give the environment `step`")
