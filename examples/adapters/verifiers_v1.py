"""Environments of Prime Intellect's `verifiers` 0.4: a taskset, and the `Env` in which one agent plays a task of it.

    multi_turn:
      environment: examples/adapters/verifiers_v1.py:VerifiersV1
      environment_args: {name: TASKSET_ID}

The taskset is an installed package or a module beside the config. The other `environment_args` are the fields of the
taskset's config. The trainer's policy takes the agent's place:
`interaction.turn` waits for its next turn, so no harness, runtime or interception server starts. Environments with
several agents, tools or a container need these, and are refused.

`python examples/adapters/verifiers_v1.py TASKSET_ID [ARGS_AS_JSON] [COUNT] > rows.jsonl` writes the rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from megagrpo.environments.episodes.episode import EnvironmentLost

try:
    import verifiers.v1 as vf
    from verifiers.v1.agent import Segment
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.episode import EnvInfo, Episode
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config
except ImportError as error:
    raise ImportError(f"multi_turn.environment: pip install 'verifiers>=0.4' ({error})") from error

Message = dict[str, Any]


class VerifiersV1:
    """An episode of an environment. The reward is the weighted sum that its trace has."""

    def __init__(self, name: str, **kwargs: Any):
        self._env = load_environment(resolve_env_config({"taskset": {"id": name, **kwargs}}))
        task, taskset = type(self._env.taskset).task_type(), self._env.taskset
        if len(agent_config_fields(self._env.config)) != 1:
            raise ValueError(f"{name} has several agents; the policy can take the place of one")
        if task.NEEDS_CONTAINER or task.toolsets(taskset.config.task) or taskset.toolsets(taskset.config):
            raise ValueError(f"{name} needs a container or tool servers of verifiers, which only its own agents start")
        self._seat: _Seat | None = None
        self._running: asyncio.Task[None] | None = None

    async def reset(self, idx: int, **columns: Any) -> str | None:
        """Begin an episode of task `idx`. Returns what the environment says first, for the end of the prompt."""
        await self.close()
        task = next(iter(self._env.taskset.include(idx=[int(idx)])))
        self._seat = _Seat(task)
        self._running = asyncio.create_task(self._play(task, self._seat))
        message = await self._asked()
        return None if message is None else "\n" + message

    async def step(self, messages: list[Message]) -> tuple[list[Message], bool]:
        """Give the last message to the environment. Returns messages with its answer, and whether it has ended."""
        assert self._seat is not None and self._running is not None, "`reset` has begun the episode"
        self._seat.replies.put_nowait(messages[-1]["content"])
        message = await self._asked()
        return (messages, True) if message is None else ([*messages, {"role": "user", "content": message}], False)

    async def get_reward(self) -> float:
        """Return the reward. An environment that waits for another turn is told that the exchange has ended."""
        assert self._seat is not None and self._running is not None, "`reset` has begun the episode"
        while not self._running.done():
            self._seat.replies.put_nowait(None)
            await self._asked()
        self._running.result()
        return float(self._seat.trace.reward)

    async def close(self) -> None:
        """End an episode that is under way: its environment is cancelled, and cleans up."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _asked(self) -> str | None:
        """Wait until the environment asks for a turn; return its message, None at its end or for a task's prompt."""
        assert self._seat is not None and self._running is not None, "`reset` has begun the episode"
        asked = asyncio.ensure_future(self._seat.asked.get())
        await asyncio.wait({asked, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        if error := self._running.exception():
            raise EnvironmentLost(f"{type(self._env).__name__}: {error!r}") from error
        return None

    async def _play(self, task: Any, seat: _Seat) -> None:
        record = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = Episode(env=EnvInfo(id=self._env.config.env_id), task=record, traces=[seat.trace])
        agents = _Agents(seat)
        await self._env.setup(agents)
        await self._env.run(task, agents)
        await self._env.finalize(task, episode)


class _Agents:
    """Gives the policy for the name of the only agent."""

    def __init__(self, seat: _Seat):
        self._seat = seat

    def __getattr__(self, name: str) -> _Seat:
        return self._seat


class _Seat:
    """The policy as an agent of verifiers, and its interaction: the caller is the user, as in `Agent.interaction`."""

    trainable = True

    def __init__(self, task: Any):
        self.asked: asyncio.Queue[str | None] = asyncio.Queue()
        self.replies: asyncio.Queue[str | None] = asyncio.Queue()
        record = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        self.trace = Trace(task=record, state=state_cls(type(task))(), agent=AgentInfo(config=vf.AgentConfig()))

    async def run(self, task: Any, **_: Any) -> Any:
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return self.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[_Seat]:
        for message in _prompt(task.data):
            self._note(message["role"], message["content"])
        yield self
        self.trace.ok = self.trace.is_completed = True
        await task.finalize(self.trace, None)
        await task.score(self.trace)

    async def turn(self, message: str | None = None) -> Segment:
        if message is not None:
            self._note("user", message)
        self.asked.put_nowait(message)
        reply = await self.replies.get()
        if reply is None:
            return Segment(messages=[], terminated=True)
        return Segment(messages=[self._note("assistant", reply, sampled=True)])

    def _note(self, role: str, content: str, sampled: bool = False) -> Any:
        kinds = {"system": vf.SystemMessage, "assistant": vf.AssistantMessage}
        message = kinds.get(role, vf.UserMessage)(content=content)
        parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
        self.trace.nodes.append(MessageNode(parent=parent, message=message, sampled=sampled))
        return message


def _prompt(data: Any) -> list[Message]:
    prompt = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt or []
    messages = [m if isinstance(m, dict) else {"role": m.role, "content": m.content} for m in prompt]
    return [{"role": "system", "content": data.system_prompt}, *messages] if data.system_prompt else messages


def main() -> None:
    """Write the tasks of a taskset as rows: `prompt` and `idx`. A task without a prompt gets an empty user message."""
    name, arguments, count = sys.argv[1:] + ["{}", "1000000"][len(sys.argv) - 2 :]
    taskset = load_environment(resolve_env_config({"taskset": {"id": name, **json.loads(arguments)}})).taskset
    for task in itertools.islice(taskset, int(count)):
        print(json.dumps({"prompt": _prompt(task.data) or [{"role": "user", "content": ""}], "idx": task.data.idx}))


if __name__ == "__main__":
    main()
