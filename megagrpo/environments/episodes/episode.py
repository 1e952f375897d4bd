"""The process of one episode: it holds an environment, a scheduler class, or both, and answers the worker's calls.

A worker forks it (`hosted.py`). With `multi_turn.container` a command starts it instead, as
`python -m megagrpo.environments.episodes.episode` in a container or in another Python. It then speaks over stdin
and stdout. A call is [verb, arguments]. The answer is {"value": value} or
{"failure": reason} (`rewards/workers/channel.py`).
This module imports the standard library only, besides modules of this package that do the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import mmap
import os
import re
import select
import signal
import socket
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any, NoReturn

from megagrpo.environments.episodes.tool_schema import tool_schema
from megagrpo.rewards.registry.reward_values import MAX_REWARD, InvalidRewards, reward_of
from megagrpo.rewards.registry.target import Target
from megagrpo.rewards.workers.channel import Channel, as_json, from_json
from megagrpo.rewards.workers.worker import explain, find, tie_to_parent

Arguments = dict[str, Any]
NOT_TOOLS = ("reset", "get_reward", "close")
INVALID_ACTION = "That is not a valid action."  # an adapter's answer to a turn that names no action
_COPIED_BYTES = 1 << 16  # per read between a container's stdio and the process of the episode


class EnvironmentLost(RuntimeError):
    """An environment raises this when it cannot go on: its response fails. Other errors of a tool go to the policy."""


class _Ended(BaseException):
    """Raised in the main thread when this process has to end: whatever the environment does is given up."""


class Loop:
    """One event loop for all calls of a process, so that a connection opened in one call serves the next. It runs in a
    thread, so that connections also answer between calls.

    It begins with the first coroutine: a worker that forks episodes must have none.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def awaited(self, value: Any) -> Any:
        """Return the value of a plain function, or await what a coroutine function returned."""
        if not inspect.isawaitable(value):
            return value

        async def wait() -> Any:
            return await value

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            Thread(target=self._loop.run_forever, name="event loop of an environment", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(wait(), self._loop)
        try:
            return future.result()
        except _Ended:
            future.cancel()
            raise


class Players:
    """The environment and the scheduler of one process. Constructed at its first call; one episode after another may
    use it: `reset` begins the next one, with the same environment and a new scheduler."""

    def __init__(
        self,
        environment: Target | None,
        environment_args: Arguments,
        scheduler: Target | None = None,
        scheduler_args: Arguments | None = None,
    ):
        self._loop = Loop()
        self._environment_class = None if environment is None else find(environment)
        self._environment_args = environment_args | (dict(environment.preset) if environment else {})
        self._scheduler_class = None if scheduler is None else find(scheduler)
        self._scheduler_args = scheduler_args or {}
        self._environment: Any = None
        self._scheduler: Any = None

    def play(self, verb: str, arguments: Arguments) -> Any:
        """Run a verb: "describe", "reset", "step", "reward", or "tool" with a name and arguments."""
        if verb == "describe":
            return describe_environment(self._environment_class, self._environment_args, self._loop)
        if verb == "reset":
            self._scheduler = None
        self._construct()
        players = [player for player in (self._environment, self._scheduler) if player is not None]
        match verb:
            case "reset":
                return self._reset([p for p in players if hasattr(p, "reset")], arguments)
            case "step":
                return answer(players[-1].step, arguments, self._loop)
            case "reward":
                judges = {type(p).__name__: p for p in players if hasattr(p, "get_reward")}
                return {name: self._reward(name, judge, arguments) for name, judge in judges.items()}
        if hasattr(self._environment, "call_tool"):
            return used(self._environment.call_tool, arguments, self._loop)
        return used(getattr(self._environment, arguments["name"]), arguments["arguments"], self._loop)

    def close(self) -> None:
        """Call `close` of the scheduler and the environment. Their errors are printed."""
        for player in (self._scheduler, self._environment):
            try:
                if hasattr(player, "close"):
                    self._loop.awaited(player.close())
            except Exception as error:
                text = explain(error, whole=False)
                print(f"multi_turn: `{type(player).__name__}.close` failed: {text}", file=sys.stderr, flush=True)

    def _construct(self) -> None:
        if self._environment is None and self._environment_class is not None:
            self._environment = self._environment_class(**self._environment_args)
        if self._scheduler is None and self._scheduler_class is not None:
            self._scheduler = self._scheduler_class(**self._scheduler_args)

    def _reset(self, players: list[Any], columns: Arguments) -> str | None:
        texts = [self._loop.awaited(p.reset(**accepted(p.reset, columns))) for p in players]
        texts = [text for text in texts if text is not None]
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise TypeError(f"reset must return text or None, not {wrong[0]!r:.200}")
        return "".join(texts) if texts else None

    def _reward(self, name: str, judge: Any, arguments: Arguments) -> float | None:
        value = self._loop.awaited(judge.get_reward(**accepted(judge.get_reward, arguments)))
        return checked_reward(f"`{name}.get_reward`", value)


def serve(players: Callable[[], Players], channel: Channel) -> NoReturn:
    """Answer the calls that arrive at `channel` until the other side closes it, or until SIGTERM, also in the middle of
    a call. Then close the players; never returns. The sender of SIGTERM kills this process after a time limit."""
    ending = _Ending()
    loaded: list[Players] = []
    try:
        with contextlib.suppress(_Ended, EOFError, OSError):
            _answer_calls(players, loaded, channel, ending)
        ending.begin()
    except _Ended:  # SIGTERM came with the end of the channel
        pass
    for one in loaded:
        one.close()
    os._exit(0)


class _Ending:
    """The end of this process on SIGTERM. `pid` is this process, not one that user code forks."""

    def __init__(self) -> None:
        self.pid, self.has_begun = os.getpid(), False
        self.listen()

    def listen(self) -> None:
        """Take SIGTERM, also back from an environment that has installed its own handler."""
        signal.signal(signal.SIGTERM, self._interrupt)

    def _interrupt(self, *_: Any) -> None:
        if os.getpid() != self.pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif not self.has_begun:
            self.begin()
            raise _Ended

    def begin(self) -> None:
        """Ignore later signals, and drop the output if it has lost its reader."""
        self.has_begun = True
        for descriptor in (1, 2):
            output = select.poll()
            output.register(descriptor, 0)
            if output.poll(0):  # what `close` prints would raise BrokenPipeError
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _answer_calls(players: Callable[[], Players], loaded: list[Players], channel: Channel, ending: _Ending) -> NoReturn:
    """Answer calls. Appends the players to `loaded` when they are made. Raises _Ended on SIGTERM, EOFError when the
    other side has closed the channel."""
    while True:
        verb, arguments = from_json(channel.receive())
        try:
            if not loaded:
                loaded.append(players())
            reply = {"value": loaded[0].play(verb, arguments)}
        except _Ended:
            raise
        except (InvalidRewards, EnvironmentLost) as error:
            reply = {"failure": str(error)}
        except BaseException as error:
            reply = {"failure": explain(error, whole=False)}
        if os.getpid() != ending.pid:  # user code has forked, and the copy has returned too
            os._exit(0)
        if ending.has_begun:  # user code has caught _Ended
            raise _Ended
        ending.listen()
        try:
            channel.send(reply)
        except (TypeError, ValueError, RecursionError) as error:
            channel.send({"failure": f"its result cannot be sent: {error}"})


def describe_environment(environment: Any, arguments: Arguments, loop: Loop) -> Arguments:
    """Return `tools` (schemas), `steps` (whether it answers turns without calls), `reward_names` and `closes` (whether
    it has `close`) of a class.

    An instance is constructed, and closed, only if its tools are known by asking (`list_tools`). Raises ValueError for
    a class that cannot be used.
    """
    if not isinstance(environment, type) or not callable(getattr(environment, "reset", None)):
        raise ValueError(f"`{getattr(environment, '__name__', environment)}` must be a class with a method `reset`")
    unknown_argument(environment, arguments)
    steps, closes = takes_turns(environment), hasattr(environment, "close")
    if hasattr(environment, "list_tools"):
        instance = environment(**arguments)
        try:
            tools = loop.awaited(instance.list_tools())
        finally:
            if closes:
                loop.awaited(instance.close())
    else:
        names = [name for name, _ in inspect.getmembers(environment, inspect.isfunction)]
        names = [name for name in names if not name.startswith("_") and name not in NOT_TOOLS]
        # bound to any object, because a schema has no `self`; no instance is created
        bound = [getattr(environment, name).__get__(object()) for name in names if not (steps and name == "step")]
        tools = [tool_schema(method) for method in bound]
    reward_names = [environment.__name__] if hasattr(environment, "get_reward") else []
    return {"tools": tools, "steps": steps, "reward_names": reward_names, "closes": closes}


def takes_turns(environment: type) -> bool:
    """Whether a class answers the policy's turns: it has `step(self, messages, ...)`. Another `step` is a tool."""
    return hasattr(environment, "step") and "messages" in inspect.signature(environment.step).parameters


def unknown_argument(function: Any, arguments: Arguments) -> None:
    """Raise ValueError for an argument of the config that a constructor or function does not take."""
    known = accepted(function, arguments)
    if unknown := [name for name in arguments if name not in known]:
        takes = ", ".join(inspect.signature(function).parameters)
        raise ValueError(f"`{function.__name__}` has no argument `{unknown[0]}`; its arguments: {takes}")


def used(function: Callable[..., Any], arguments: Arguments, loop: Loop) -> Arguments:
    """Call a tool. Returns {"result": text}, or {"error": text} if it raises; the text is the tool message."""
    try:
        result = loop.awaited(function(**arguments))
        return {"result": result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_text)}
    except EnvironmentLost:
        raise
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def _text(value: Any) -> str:
    """Return the text of a value that JSON does not have. Raises TypeError for one that only shows its address, which
    differs from run to run."""
    if re.search(r" at 0x[0-9a-f]+>$", text := str(value)):
        kind = type(value).__name__
        raise TypeError(f"the tool returned a {kind}, which has no text; return text, numbers, lists or dicts")
    return text


def answer(
    function: Callable[..., Any], arguments: Arguments, loop: Loop
) -> tuple[list[dict[str, Any]], bool, float | None]:
    """Call a scheduler or `step`. Returns messages with any follow-up, whether to end, and the turn's reward."""
    match result := loop.awaited(function(**accepted(function, arguments))):
        case (list() as messages, bool() as done):
            return messages, done, None
        case (list() as messages, bool() as done, reward):
            name = getattr(function, "__qualname__", function)
            return messages, done, checked_reward(f"the reward of `{name}`", reward)
    raise TypeError(f"a scheduler must return (messages, done) or (messages, done, reward), not {result!r:.200}")


def accepted(function: Callable[..., Any], arguments: Arguments) -> Arguments:
    """Return the arguments that `function` takes by name."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    return {name: value for name, value in arguments.items() if name in {p.name for p in parameters}}


def checked_reward(what: str, value: Any) -> float | None:
    """Return a reward as a float or None. Raises InvalidRewards that begins with `what`."""
    try:
        return None if value is None else reward_of(value)
    except (TypeError, ValueError) as error:
        raise InvalidRewards(f"{what}: {error}") from None


def is_valid(verb: str, value: Any) -> bool:
    """Whether the value of an episode's `verb`, perhaps from user code, has the shape that the trainer expects."""
    match verb, value:
        case "reset", str() | None:
            return True
        case "describe", {
            "tools": list() as tools,
            "steps": bool(),
            "closes": bool(),
            "reward_names": list() as names,
            **rest,
        }:
            return not rest and all(map(_is_schema, tools)) and all(isinstance(name, str) for name in names)
        case "reward", dict() as rewards:
            return all(map(_is_reward, rewards.values()))
        case "step", [list() as messages, bool(), reward]:
            return _is_reward(reward) and all(isinstance(message, dict) for message in messages)
        case "tool", {"result": str(), **rest} | {"error": str(), **rest}:
            return not rest
    return False


def _is_schema(value: Any) -> bool:
    match value:
        case {"type": "function", "function": {"name": str(), "parameters": dict()}}:
            return True
    return False


def _is_reward(value: Any) -> bool:
    return value is None or (type(value) is float and abs(value) <= MAX_REWARD)  # False for NaN


# ------------------------------------------------------------------------------------------- in a container, over stdio


def main() -> None:
    """Serve an episode over stdin and stdout. The first message holds the arguments of `Players` and `close_seconds`.

    User code runs in a child process. When stdin closes, because the trainer ended the episode, the child gets SIGTERM
    and is killed when it misses its time limit, even in the middle of a call: a runtime's command line does not pass
    SIGKILL on to its container.
    """
    ours, theirs = socket.socketpair()
    output = os.dup(1)
    os.dup2(2, 1)  # what user code prints must not mix with the answers
    close_seconds = memoryview(mmap.mmap(-1, 8)).cast("d")  # shared with the child, which reads the first message
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        tie_to_parent()
        os.close(output)
        ours.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        channel = Channel(theirs)
        options = from_json(channel.receive())
        close_seconds[0] = options.pop("close_seconds")
        serve(lambda: Players(**options), channel)
    theirs.close()
    with contextlib.suppress(OSError):  # the child has done it
        os.setpgid(child, child)
    try:
        _copy(0, ours, output)
    finally:
        os.kill(child, signal.SIGTERM)
        select.select([os.pidfd_open(child)], [], [], close_seconds[0])
        os.killpg(child, signal.SIGKILL)


def _copy(source: int, players: socket.socket, output: int) -> None:
    """Copy bytes from `source` to `players` and from there to `output` until one of the two ends."""
    while True:
        for ready in select.select([source, players.fileno()], [], [])[0]:
            if ready == source:
                if not (data := os.read(source, _COPIED_BYTES)):
                    return
                players.sendall(data)
            else:
                if not (data := players.recv(_COPIED_BYTES)):
                    return
                while data:
                    data = data[os.write(output, data) :]


def options_message(environment: Target, environment_args: Arguments, close_seconds: float) -> Any:
    """Return the first message for `main`."""
    options = {"environment": environment, "environment_args": environment_args, "close_seconds": close_seconds}
    return as_json(options)


if __name__ == "__main__":
    main()
