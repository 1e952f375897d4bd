"""The part of multi_turn in worker processes: tools, scheduler functions, and the processes of episodes.

Functions are stateless, so any worker may call them. Classes hold the state of one response: an instance lives in a
process forked from a worker that has already imported the class, or started by `multi_turn.container`. A call that
hangs therefore ends only this episode. This module imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import shlex
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megagrpo.environments.episodes.endings import Guard, end_group, kill_group
from megagrpo.environments.episodes.episode import (
    Loop,
    Players,
    answer,
    is_valid,
    options_message,
    serve,
    unknown_argument,
    used,
)
from megagrpo.environments.episodes.tool_schema import tool_schema
from megagrpo.rewards.registry.reward_values import InvalidRewards
from megagrpo.rewards.registry.target import Target
from megagrpo.rewards.workers.channel import Channel, ProtocolError, as_json
from megagrpo.rewards.workers.worker import find, leave_trainer, tie_to_parent

Arguments = dict[str, Any]
MALFORMED = "its process broke the protocol: it sent a malformed answer"
_MODULE = "megagrpo.environments.episodes.episode"
_PACKAGE = str(Path(__file__).resolve().parents[3])  # the folder that holds the package megagrpo
_DESCRIBED = -1  # number of the episode that describes the environment


@dataclass
class _Child:
    pid: int
    channel: Channel
    process: subprocess.Popen[bytes] | None = None  # of a container's command
    is_sound: bool = True  # no call has failed, so another episode may use it
    is_called: bool = False


class Hosted:
    """The callable that a worker runs: it calls one of its methods by name. It is made once per worker, and imports the
    scheduler, the tools and the environment before any deadline starts. The methods of episodes are coroutines, and run
    in workers of coroutines, where a slow episode delays no other one."""

    def __init__(
        self,
        scheduler: Target | None,
        scheduler_args: Arguments,
        tools: list[Target],
        environment: Target | None,
        environment_args: Arguments,
        container: str | None = None,
        reuse: bool = False,
        close_seconds: float = 10.0,
    ):
        self._loop = Loop()
        self._scheduler = None if scheduler is None else find(scheduler)
        self._targets = scheduler, environment
        self._scheduler_args, self._environment_args = scheduler_args, environment_args
        self._container, self._reuse, self._close_seconds = container, reuse, close_seconds
        players = [self._scheduler]
        if environment is not None and container is None:
            players.append(find(environment))  # imported here, before episodes are forked
        self._closes = any(hasattr(player, "close") for player in players)  # whether a forked process needs time to end
        loaded = [(find(target), target) for target in tools]
        self._functions = [tool for tool, _ in loaded if not isinstance(tool, type)]
        # a class holds tools that are known by asking it
        self._toolsets = [tool(**dict(target.preset)) for tool, target in loaded if isinstance(tool, type)]
        self._toolset_of: dict[str, Any] = {}  # by the name of a tool
        self._children: dict[int, _Child] = {}  # the processes of episodes, by number
        self._idle: list[_Child] = []  # processes that wait for their next episode
        self._endings: set[asyncio.Task[None]] = set()  # of processes whose environment may be closing
        self._peak = 0  # most episodes at once
        self._guard: Guard | None = None  # started before the first episode

    def __call__(self, method: str, arguments: Arguments) -> Any:
        return getattr(self, method)(**arguments)

    def describe(self, timeout: float) -> Arguments:
        """Describe scheduler, tools and environment to the trainer, before the first prompt.

        Returns `tools` (all schemas), `methods` (environment tool names), `reward_names`, `takes_turns` (whether turns
        without calls are answered), `turns_keep_state` (whether by an episode), `keeps_state` (whether responses need
        episodes), `closes` (whether an episode needs time to end). Raises ValueError for an unusable target,
        InvalidRewards for an environment's process that fails.
        """
        schemas: list[dict[str, Any]] = []
        reward_names: list[str] = []
        scheduler, (scheduler_target, environment) = self._scheduler, self._targets
        steps, closes = False, hasattr(scheduler, "close")
        if environment is not None:
            described = asyncio.run(self._describe_environment(timeout))
            schemas, reward_names, steps = described["tools"], described["reward_names"], described["steps"]
            closes |= described["closes"]
        methods = [schema["function"]["name"] for schema in schemas]
        schemas = [tool_schema(tool) for tool in self._functions] + self._ask_toolsets() + schemas
        is_class = isinstance(scheduler, type)
        if scheduler is not None and scheduler_target is not None:
            if steps:
                raise ValueError("the environment answers turns itself (`step`); leave multi_turn.scheduler out")
            if is_class and not callable(getattr(scheduler, "step", None)):
                raise ValueError(f"the class `{scheduler_target.attribute}` must have a method `step`")
            unknown_argument(scheduler, self._scheduler_args)
            own = [scheduler.__name__] if is_class and hasattr(scheduler, "get_reward") else []
            reward_names = [*reward_names, "turns", *own]
        elif steps:
            reward_names = [*reward_names, "turns"]
        names = [schema["function"]["name"] for schema in schemas]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two tools are named `{twice[0]}`; rename one")
        described = {"tools": schemas, "methods": methods, "reward_names": reward_names}
        described |= {"takes_turns": scheduler is not None or steps, "turns_keep_state": is_class or steps}
        return described | {"keeps_state": is_class or environment is not None, "closes": closes}

    async def _describe_environment(self, timeout: float) -> Arguments:
        self._children[_DESCRIBED] = self._start()
        try:
            described: Arguments = await self.act(_DESCRIBED, "describe", {}, timeout)
            return described
        finally:
            await self.end_all()

    def _ask_toolsets(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = []
        for toolset in self._toolsets:
            schemas = self._loop.awaited(toolset.list_tools())
            self._toolset_of |= {schema["function"]["name"]: toolset for schema in schemas}
            listed += schemas
        return listed

    def use_tool(self, name: str, arguments: Arguments) -> Arguments:
        """Call a tool. Returns {"result": text}, or {"error": text} if it raises; the text is the tool message."""
        if function := next((tool for tool in self._functions if tool.__name__ == name), None):
            return used(function, arguments, self._loop)
        if name not in self._toolset_of:  # a worker that was not asked to describe them
            self._ask_toolsets()
        return used(self._toolset_of[name].call_tool, {"name": name, "arguments": arguments}, self._loop)

    def schedule(self, arguments: Arguments) -> tuple[list[dict[str, Any]], bool, float | None]:
        """Call a scheduler function. Returns messages with any follow-up, whether to end, and the turn's reward."""
        assert self._scheduler is not None, "only a scheduler is asked"
        return answer(self._scheduler, arguments | self._scheduler_args, self._loop)

    async def begin(self, number: int, columns: Arguments, timeout: float) -> str | None:
        """Start episode `number`, in a new process or one that has ended an episode, and reset it. Returns the text of
        `reset` for the end of the prompt, or None. Raises as `act`.

        Environments that are closing count: a new one waits until there are fewer than the most episodes so far, so a
        server or a cloud with a limit never gets more environments than there are conversations.
        """
        waiting = None
        while self._idle and waiting is None:
            waiting = self._idle.pop()
            if select.select([waiting.channel], [], [], 0)[0]:  # it has died, or sent something unasked
                self._end(waiting)
                waiting = None
        while waiting is None and self._endings and len(self._children) + len(self._endings) >= self._peak:
            await asyncio.wait(self._endings, return_when=asyncio.FIRST_COMPLETED)
        self._children[number] = waiting or self._start()
        self._peak = max(self._peak, len(self._children))
        text: str | None = await self.act(number, "reset", columns, timeout)
        return text

    async def act(self, number: int, verb: str, arguments: Arguments, timeout: float) -> Any:
        """Run `verb` of an episode: "step", "reward", or "tool" with its `name` and `arguments`. Returns its value.

        Raises InvalidRewards with the reason of a failure. An episode that misses a deadline or dies is over: every
        later call of it fails too.
        """
        child = self._children.get(number)
        if child is None:
            raise InvalidRewards("its process has ended")
        if child.is_called:  # the conversation did not wait for the call before
            raise InvalidRewards("no answer in time")
        was_sound, child.is_sound, child.is_called = child.is_sound, False, True
        try:
            child.channel.send(as_json([verb, arguments]))
            match await child.channel.receive_async(timeout):
                case {"failure": str() as failure, **rest} if not rest:
                    raise InvalidRewards(failure)
                case {"value": value, **rest} if not rest and is_valid(verb, value):
                    child.is_sound = was_sound
                    return value
            failure = MALFORMED
        except TimeoutError:
            failure = "no answer in time"
        except ProtocolError as error:
            failure = f"its process broke the protocol: {error}"
        except (EOFError, OSError):
            failure = f"its process died{await _exit_status(child)}"
        finally:
            child.is_called = False
        if self._children.get(number) is child:
            await self.finish(number)
        else:  # it was ended meanwhile
            child.channel.close()
        raise InvalidRewards(failure)

    async def finish(self, number: int) -> None:
        """End an episode: close its environment and kill all processes it started, or keep its process for another
        episode. Does not wait for the end."""
        child = self._children.pop(number, None)
        if child is not None and self._reuse and child.is_sound:
            self._idle.append(child)
        elif child is not None:
            self._end(child)

    async def end_all(self) -> None:
        """End all episodes, and wait until their processes have ended."""
        for child in [*self._children.values(), *self._idle]:
            self._end(child)
        self._children.clear()
        self._idle.clear()
        await asyncio.gather(*self._endings)

    def _end(self, child: _Child) -> None:
        if child.process is None and not self._closes:
            kill_group(child.pid)
            self._reap(child)
            return
        ending = asyncio.create_task(self._ended(child))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _ended(self, child: _Child) -> None:
        """End a process. A forked one closes its environment on SIGTERM, one in a container when its stdin ends."""
        child.channel.end_sending()
        await end_group(child.pid, signal.SIGTERM if child.process is None else 0, self._close_seconds)
        self._reap(child)

    def _reap(self, child: _Child) -> None:
        assert self._guard is not None, "it was started before the process"
        self._guard.remove(child.pid)
        if child.process is None:
            os.waitpid(child.pid, 0)
        else:
            child.process.wait()
        if not child.is_called:  # else `act` sees the end of the process, and closes its channel
            child.channel.close()

    def _start(self) -> _Child:
        """Start the process of an episode."""
        if self._guard is None:
            self._guard = Guard(self._close_seconds, leave_trainer)
        ours, theirs = socket.socketpair()
        if self._container is not None:
            process = subprocess.Popen(
                self._command(), stdin=theirs.fileno(), stdout=theirs.fileno(), start_new_session=True
            )
            theirs.close()
            self._guard.add(process.pid, 0)
            child = _Child(process.pid, Channel(ours), process)
            with contextlib.suppress(OSError):  # it has ended already, which the first call reports
                child.channel.send(options_message(self._environment, self._environment_args, self._close_seconds))
            return child
        pid = os.fork()
        if pid == 0:
            asyncio.events._set_running_loop(None)  # the worker's; the episode may run its own
            ours.close()
            self._guard.close()
            self._live(Channel(theirs))
        self._guard.add(pid, self._last_signal)
        theirs.close()
        return _Child(pid, Channel(ours))

    @property
    def _last_signal(self) -> int:
        """The signal for a forked process when its worker dies."""
        return signal.SIGTERM if self._closes else signal.SIGKILL

    @property
    def _environment(self) -> Target:
        environment = self._targets[1]
        assert environment is not None, "a container holds an environment"
        return environment

    def _command(self) -> list[str]:
        """Return the words of `multi_turn.container` with its placeholders filled in."""
        assert self._container is not None, "there is a template"
        location = self._environment.location
        folder = str(Path(location).parent) if location.endswith(".py") else _PACKAGE
        words, name = list[str](), f"megagrpo-{secrets.token_hex(8)}"
        for word in shlex.split(self._container):
            filled = word.replace("{module}", _MODULE).replace("{package}", _PACKAGE).replace("{folder}", folder)
            filled = filled.replace("{name}", name)
            words += ["python3", "-m", _MODULE] if word == "{command}" else [filled]
        return words

    def _live(self, channel: Channel) -> NoReturn:
        """Serve the episode's calls in the forked process; never returns."""
        os.setsid()  # its guard ends it, not the guard of the worker's session
        tie_to_parent(self._last_signal)
        leave_trainer()
        scheduler, environment = self._targets
        scheduler = scheduler if isinstance(self._scheduler, type) else None
        players = environment, self._environment_args, scheduler, self._scheduler_args
        serve(lambda: Players(*players), channel)


async def _exit_status(child: _Child) -> str:
    """Return the exit status of a container's command, which ends soon after its connection; empty without one. It is
    not reaped: the guard and `_ended` know it by its id."""
    for _ in range(20 if child.process else 0):
        if ended := os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return f" (exit status {ended.si_status})"
        await asyncio.sleep(0.05)
    return ""
