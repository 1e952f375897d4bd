"""The part of an agent in worker processes: each conversation runs in a process forked from a worker that has already
imported the agent, so it costs no import, has its own environment variables, and can be killed alone.

This module imports no torch.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import socket
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NoReturn
from urllib.parse import urlsplit

from megagrpo.environments.agents.agent_requests import POLICY_NAME
from megagrpo.environments.episodes.endings import kill_group
from megagrpo.environments.episodes.episode import accepted
from megagrpo.environments.episodes.hosted import MALFORMED
from megagrpo.environments.programs.program_host import first_message
from megagrpo.platform.process.variables import ENVIRONMENT, put
from megagrpo.rewards.registry.reward_values import InvalidRewards, reward_of
from megagrpo.rewards.registry.target import Target
from megagrpo.rewards.workers.channel import Channel, as_json
from megagrpo.rewards.workers.worker import (
    awaited,
    explain,
    find,
    flush,
    leave_trainer,
    named_parameters,
    tie_to_parent,
)

Reward = float | dict[str, float | None] | None  # of a conversation, or of its roles


@dataclass(frozen=True)
class Client:
    """What an agent needs to talk to the policy, for example with `openai.AsyncOpenAI(base_url=..., api_key=...)`."""

    base_url: str
    api_key: str
    model: str

    def role(self, name: str) -> Client:
        """Return the client of one of the agent's roles: `client.role("verifier").model` is "policy:verifier"."""
        return replace(self, model=f"{POLICY_NAME}:{name}")


class AgentHost:
    """The coroutine function that a worker runs. It is made once per worker, and imports the agent before any deadline
    starts."""

    def __init__(self, agent: Target, roles: Sequence[str] = ()):
        self._agent, self._name, self._roles = find(agent), agent.attribute, roles
        if not callable(self._agent):
            raise ValueError(f"`{self._name}` must be a function")
        if unlisted := [role for role in _named_roles(self._agent, set()) if role not in roles]:
            fix = f"list it, or use {', '.join(roles)}" if roles else "list it, the run has no roles"
            raise ValueError(f"`{self._name}` names the role {unlisted[0]!r:.100}, which roles does not list; {fix}")
        required = [p.name for p in named_parameters(self._agent, skip_first=False)[0] if p.default is p.empty]
        self.needs_columns = [(name,) for name in required if name not in ("client", "prompt")]

    async def __call__(self, client: dict[str, str], arguments: dict[str, Any]) -> Reward:
        """Run the agent in a new process, and return the reward that it returned, with roles the rewards by role. A
        cancelled call kills the process.

        Raises InvalidRewards with the reason of a failure.
        """
        ours, theirs = socket.socketpair()
        flush()  # else every process prints again what waits in the buffers
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._live(Channel(theirs), Client(**client), arguments)
        theirs.close()
        try:
            answer = await first_message(ours)
        finally:
            ours.close()
            _end(pid)
        match answer:
            case {"failure": str() as failure, **rest} if not rest:
                raise InvalidRewards(failure)
            case {"value": float() | None as value, **rest} if not rest:
                return value
            case {"value": dict() as values, **rest} if not rest and _are_rewards(values, self._roles):
                return values
        raise InvalidRewards("its process died" if answer is None else MALFORMED)

    def _live(self, channel: Channel, client: Client, arguments: dict[str, Any]) -> NoReturn:
        """Run the agent in the forked process; never returns: the stack below is its worker's."""
        try:
            self._run(channel, client, arguments)
        finally:
            os._exit(1)

    def _run(self, channel: Channel, client: Client, arguments: dict[str, Any]) -> NoReturn:
        os.setpgid(0, 0)
        tie_to_parent()
        leave_trainer()
        os.register_at_fork(after_in_child=channel.close)  # else a process that outlives this one hides its end
        pid = os.getpid()
        put({"OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key})
        put({"OPENAI_AGENTS_DISABLE_TRACING": "1"})  # it sends every conversation to OpenAI
        for name in ("NO_PROXY", "no_proxy"):
            put({name: ",".join(filter(None, (ENVIRONMENT.get(name), urlsplit(client.base_url).hostname)))})
        try:
            value = awaited(self._agent(**accepted(self._agent, arguments | {"client": client})))
            answer: dict[str, Reward | str] = {"value": self._checked(value)}
        except BaseException as error:
            answer = {"failure": explain(error, whole=False)}
        flush()
        if os.getpid() == pid:  # else the agent has forked, and the copy has returned too
            channel.send(as_json(answer))
        os._exit(0)

    def _checked(self, value: Any) -> Reward:
        """Return the agent's reward. Raises TypeError or ValueError that names the fault."""
        said = f"`{self._name}` returned"
        if not self._roles or value is None:
            return None if value is None else reward_of(value, said)
        if not isinstance(value, Mapping):
            fix = "return a mapping from each role that took a turn to its reward (multi_turn.agent has roles)"
            raise TypeError(f"{said} {value!r:.100}; {fix}")
        if unknown := [role for role in value if role not in self._roles]:
            raise ValueError(f"{said} a reward for the role {unknown[0]!r:.100}, which multi_turn.agent does not list")
        return {role: None if r is None else reward_of(r, f"{said} for the role {role}") for role, r in value.items()}


def _named_roles(function: Any, seen: set[Any]) -> Iterator[str]:
    """Yield the roles that a function, or one of its file that it uses, names in its source: in the text
    "policy:NAME", in `client.role("NAME")`, and the function itself as keys of a returned mapping."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or function in seen:
        return
    is_agent, module = not seen, function.__module__
    seen.add(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # it was not read from a file
        return
    inner = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    nested = {id(node) for each in inner[1:] for node in ast.walk(each)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if found := re.fullmatch(rf"{POLICY_NAME}:([\w-]+)", text):
                yield found[1]
            case ast.Call(func=ast.Attribute(ast.Name("client"), "role"), args=[ast.Constant(value=str(name))]):
                yield name
            case ast.Return(ast.Dict(keys=keys)) if is_agent and id(node) not in nested:
                yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
            case ast.Name() if getattr(other := function.__globals__.get(node.id), "__module__", "") == module:
                yield from _named_roles(other, seen)


def _are_rewards(values: dict[Any, Any], roles: Sequence[str]) -> bool:
    return values.keys() <= set(roles) and all(type(value) in (float, type(None)) for value in values.values())


def _end(pid: int) -> None:
    """Kill a conversation's process and all processes that it started."""
    kill_group(pid)
    os.waitpid(pid, 0)
