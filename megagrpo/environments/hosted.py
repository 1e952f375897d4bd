"""The part of multi_turn in worker processes: tools, schedulers, environments, with an episode per stateful response.

Functions are stateless, so any worker may call them. Classes hold the state of one response: an instance lives in a
process forked from a worker that has already imported the class. A call that hangs therefore ends only this episode.
This module imports no torch.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from megagrpo.environments.tool_schema import tool_schema
from megagrpo.rewards.target import Target
from megagrpo.rewards.workers.channel import Channel, ProtocolError, as_json, from_json
from megagrpo.rewards.workers.values import MAX_REWARD, InvalidRewards, reward_of
from megagrpo.rewards.workers.worker import awaited, explain, find, leave_trainer, tie_to_parent

Arguments = dict[str, Any]
MALFORMED = "its process broke the protocol: it sent a malformed answer"
NOT_TOOLS = ("reset", "get_reward")


@dataclass
class _Child:
    pid: int
    channel: Channel


class Hosted:
    """The callable that a worker runs: it calls one of its methods by name. It is made once per worker, and imports the
    scheduler, the tools and the environment before any deadline starts."""

    def __init__(
        self, scheduler: Target | None, scheduler_args: Arguments, tools: list[Target], environment: Target | None
    ):
        self._scheduler = None if scheduler is None else find(scheduler)
        self._environment = None if environment is None else find(environment)
        # the names that the config gives to the two
        self._names = [None if target is None else target.attribute for target in (scheduler, environment)]
        self._scheduler_args = scheduler_args
        self._tools = [find(target) for target in tools]
        self._children: dict[int, _Child] = {}  # the processes of episodes, by number

    def __call__(self, method: str, arguments: Arguments) -> Any:
        return getattr(self, method)(**arguments)

    def describe(self) -> Arguments:
        """Describe scheduler, tools and environment to the trainer, before the first prompt.

        Returns `tools` (all schemas), `methods` (environment tool names), `reward_names`,
        `scheduler_is_class`, `keeps_state` (whether responses need episodes). Raises ValueError for an unusable target.
        """
        schemas = [tool_schema(tool) for tool in self._tools]
        methods: list[str] = []
        reward_names: list[str] = []
        scheduler, environment, (scheduler_name, environment_name) = self._scheduler, self._environment, self._names
        if environment is not None:
            if not isinstance(environment, type) or not callable(getattr(environment, "reset", None)):
                raise ValueError(f"`{environment_name}` must be a class with a method `reset`")
            names = [name for name, _ in inspect.getmembers(environment, inspect.isfunction)]
            methods = [name for name in names if not name.startswith("_") and name not in NOT_TOOLS]
            # bound to any object, because a schema has no `self`; no instance is created
            schemas += [tool_schema(getattr(environment, name).__get__(object())) for name in methods]
            reward_names += [environment.__name__] if hasattr(environment, "get_reward") else []
        is_class = isinstance(scheduler, type)
        if scheduler is not None:
            if is_class and not callable(getattr(scheduler, "step", None)):
                raise ValueError(f"the class `{scheduler_name}` must have a method `step`")
            accepted = _accepted(scheduler, self._scheduler_args)
            if unknown := [name for name in self._scheduler_args if name not in accepted]:
                takes = ", ".join(inspect.signature(scheduler).parameters)
                raise ValueError(f"`{scheduler_name}` has no argument `{unknown[0]}`; its arguments: {takes}")
            reward_names += ["turns"] + ([scheduler.__name__] if is_class and hasattr(scheduler, "get_reward") else [])
        names = [schema["function"]["name"] for schema in schemas]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two tools are named `{twice[0]}`; rename one")
        described = {"tools": schemas, "methods": methods, "reward_names": reward_names, "scheduler_is_class": is_class}
        return described | {"keeps_state": is_class or environment is not None}

    def use_tool(self, name: str, arguments: Arguments) -> Arguments:
        """Call a tool. Returns {"result": text}, or {"error": text} if it raises; the text is the tool message."""
        return _used(next(tool for tool in self._tools if tool.__name__ == name), arguments)

    def schedule(self, arguments: Arguments) -> tuple[list[dict[str, Any]], bool, float | None]:
        """Call a scheduler function. Returns messages with any follow-up, whether to end, and the turn's reward."""
        assert self._scheduler is not None, "only a scheduler is asked"
        return _answer(self._scheduler, arguments | self._scheduler_args)

    def begin(self, number: int, columns: Arguments, timeout: float) -> str | None:
        """Start episode `number` in a new process and reset it. Returns the text of `reset` for the end of the prompt,
        or None. Raises as `act`."""
        self.finish(number)
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._live(Channel(theirs))
        theirs.close()
        self._children[number] = _Child(pid, Channel(ours))
        return self.act(number, "reset", columns, timeout)

    def act(self, number: int, verb: str, arguments: Arguments, timeout: float) -> Any:
        """Run `verb` of an episode: "step", "reward", or the name of a tool. Returns its value.

        Raises InvalidRewards with the reason of a failure. An episode that misses a deadline or dies is over: every
        later call of it fails too.
        """
        child = self._children.get(number)
        if child is None:
            raise InvalidRewards("its process has ended")
        try:
            child.channel.send(as_json([verb, arguments]))
            match child.channel.receive(timeout):
                case {"failure": str() as failure, **rest} if not rest:
                    raise InvalidRewards(failure)
                case {"value": value, **rest} if not rest and is_valid(verb, value):
                    return value
            failure = MALFORMED
        except TimeoutError:
            failure = "no answer in time"
        except ProtocolError as error:
            failure = f"its process broke the protocol: {error}"
        except (EOFError, OSError):
            failure = "its process died"
        self.finish(number)
        raise InvalidRewards(failure)

    def finish(self, number: int) -> None:
        """End an episode and kill all processes it started."""
        child = self._children.pop(number, None)
        if child is None:
            return
        child.channel.close()
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not created its process group yet
            os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)

    def _live(self, channel: Channel) -> NoReturn:
        """Serve the episode's calls in the forked process; never returns."""
        os.setpgid(0, 0)
        tie_to_parent()
        leave_trainer()
        pid = os.getpid()
        players: list[Any] = []  # the instances of environment and scheduler
        while True:
            try:
                verb, arguments = from_json(channel.receive())
            except EOFError:
                os._exit(0)
            try:
                players = players or self._players()
                answer = {"value": _played(players, verb, arguments)}
            except InvalidRewards as error:
                answer = {"failure": str(error)}
            except BaseException as error:
                answer = {"failure": explain(error, whole=False)}
            if os.getpid() != pid:  # user code has forked, and the copy has returned too
                os._exit(0)
            try:
                channel.send(answer)
            except (TypeError, ValueError, RecursionError) as error:
                channel.send({"failure": f"its result cannot be sent: {error}"})

    def _players(self) -> list[Any]:
        scheduler = self._scheduler(**self._scheduler_args) if isinstance(self._scheduler, type) else None
        environment = None if self._environment is None else self._environment()
        return [player for player in (environment, scheduler) if player is not None]


def _played(players: list[Any], verb: str, arguments: Arguments) -> Any:
    """Run `verb` of an episode: of the environment, which comes first, or of the scheduler, which comes last."""
    if verb == "reset":
        texts = [awaited(p.reset(**_accepted(p.reset, arguments))) for p in players if hasattr(p, "reset")]
        texts = [text for text in texts if text is not None]
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise TypeError(f"reset must return text or None, not {wrong[0]!r:.200}")
        return "".join(texts) if texts else None
    if verb == "step":
        return _answer(players[-1].step, arguments)
    if verb == "reward":
        judges = {type(p).__name__: p for p in players if hasattr(p, "get_reward")}
        return {name: _reward(f"`{name}.get_reward`", awaited(p.get_reward())) for name, p in judges.items()}
    return _used(getattr(players[0], verb), arguments)


def _used(function: Callable[..., Any], arguments: Arguments) -> Arguments:
    try:
        result = awaited(function(**arguments))
    except Exception as error:
        return {"error": str(error) or type(error).__name__}
    return {"result": result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)}


def _answer(function: Callable[..., Any], arguments: Arguments) -> tuple[list[dict[str, Any]], bool, float | None]:
    answer = awaited(function(**_accepted(function, arguments)))
    match answer:
        case (list() as messages, bool() as done):
            return messages, done, None
        case (list() as messages, bool() as done, reward):
            return messages, done, _reward(f"the reward of `{getattr(function, '__qualname__', function)}`", reward)
    raise TypeError(f"a scheduler must return (messages, done) or (messages, done, reward), not {answer!r:.200}")


def _accepted(function: Callable[..., Any], arguments: Arguments) -> Arguments:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    return {name: value for name, value in arguments.items() if name in {p.name for p in parameters}}


def is_valid(verb: str, value: Any) -> bool:
    """Whether the value of an episode's `verb`, perhaps from user code, has the shape that the trainer expects."""
    match verb, value:
        case "reset", str() | None:
            return True
        case "reward", dict() as rewards:
            return all(map(_is_reward, rewards.values()))
        case "step", [list() as messages, bool(), reward]:
            return _is_reward(reward) and all(isinstance(message, dict) for message in messages)
        case (("reset" | "reward" | "step"), _):
            return False
    # of a tool
    return (
        isinstance(value, dict)
        and [*value] in (["result"], ["error"])
        and all(isinstance(v, str) for v in value.values())
    )


def _is_reward(value: Any) -> bool:
    return value is None or (type(value) is float and abs(value) <= MAX_REWARD)  # False for NaN


def _reward(what: str, value: Any) -> float | None:
    try:
        return None if value is None else reward_of(value)
    except (TypeError, ValueError) as error:
        raise InvalidRewards(f"{what}: {error}") from None
