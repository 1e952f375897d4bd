"""The trainer's side of an agent: it runs in workers with a deadline, and a failure costs its own conversation."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megagrpo.config import MultiTurnSection
from megagrpo.data.tokens.tokenizer import as_messages
from megagrpo.environments.agents.address import Address
from megagrpo.environments.agents.agent_messages import plain
from megagrpo.environments.agents.agent_requests import POLICY_NAME, Ask
from megagrpo.environments.agents.seat import Seat
from megagrpo.environments.agents.trajectory import Trajectory
from megagrpo.environments.programs.agent_options import PROGRAM_HOST, UNIX, AgentOptions, agent_options
from megagrpo.environments.programs.left_containers import remove_left_containers, shared_folder
from megagrpo.environments.programs.listening import listening, socket_folder
from megagrpo.environments.programs.program_run import Program
from megagrpo.platform.process.cleanup.removal import remove_tree
from megagrpo.platform.process.terminal import get_logger
from megagrpo.rewards.arguments import check_needs
from megagrpo.rewards.registry.reward_registry import locate
from megagrpo.rewards.registry.target import Target
from megagrpo.rewards.workers.pool import Call, WorkerPool
from megagrpo.types import Prompt, Rollout, SamplingParams

CAPACITY = 64  # conversations of one worker at once, each in a forked process
LONGEST = 600.0  # seconds of a conversation without `multi_turn.max_seconds`
CLEAN_UP_SECONDS = 90.0  # after the deadlines of a program
IMPORT_SECONDS = 60.0  # of the agent's file at the start, and in a trial until its first request
_HOST = Target("megagrpo.environments.agents.host", "AgentHost")
COMMAND_NAME = "command"  # the name of a program and of its reward
NO_REQUEST = "it asked the policy for nothing"
_LANE = "agents"
log = get_logger(__name__)


class Agent:
    """The agent of `multi_turn.agent`, in workers of its own. Raises ValueError when it cannot be imported."""

    def __init__(self, section: MultiTurnSection, pool: WorkerPool):
        assert section.agent is not None, "the section names an agent"
        options = agent_options(section.agent)
        self._listening, self._seconds, self._pool = listening(options), section.max_seconds or LONGEST, pool
        self._host, self.name, self.roles, workers, capacity = PROGRAM_HOST, COMMAND_NAME, [*section.roles], 1, CAPACITY
        program, self._outputs = options.program(self._seconds), [*options.outputs]
        if options.function is None:  # its process has the deadlines; one worker keeps to the limits
            self._seconds += program["score_seconds"] + CLEAN_UP_SECONDS
            capacity = options.concurrent or section.workers * CAPACITY
            self._options: dict[str, Any] = {"program": program, "columns": options.columns, "at_once": capacity}
            self._options |= {"warm": options.warm, "warm_seconds": options.warm_seconds}
            if self._listening.address == UNIX:
                self._listening = replace(self._listening, folder=socket_folder())
                self._options["socket_folder"] = str(self._listening.folder)
            self._remove_left(options, Program(**program))
        else:
            target = locate(options.function, "multi_turn.agent", "agent", {})
            self._host, self.name, workers = _HOST, target.attribute, section.workers
            self._options = {"agent": target} | ({"roles": self.roles} if self.roles else {})
        self.reward_names = self.roles or [self.name]
        pool.add_lane(_LANE, workers, capacity)
        (described,) = pool.run([replace(self._call("describe", {}), load_seconds=IMPORT_SECONDS)])
        if described.kind == "timeout":
            reason = f"the import of {options.function} has not ended after {IMPORT_SECONDS:g} s"
            raise ValueError(f"multi_turn.agent: {reason}; move what waits or computes into the function")
        if described.kind != "result":
            raise ValueError(f"multi_turn.agent: {described.value}")
        self._needs = described.value["needs"]

    @staticmethod
    def _remove_left(options: AgentOptions, program: Program) -> None:
        """Remove the containers that killed runs have left. Raises ValueError if their names cannot be read."""
        if not options.names:
            return
        around = shared_folder(Path(tempfile.gettempdir()))
        try:
            count, left = remove_left_containers(
                shlex.split(options.names), program.stop, program.environment(), around
            )
        except ValueError as error:
            raise ValueError(f"multi_turn.agent.names: {error}") from None
        if count:
            log.warning("multi_turn.agent: %d containers of ended runs were left; they are removed", count - len(left))
        if left:
            log.warning("multi_turn.agent.stop: cannot remove %s; remove them", ", ".join(left))

    def close(self) -> None:
        """Remove the folder of a Unix socket. Safe to call twice."""
        if self._listening.folder is not None:
            remove_tree(self._listening.folder)

    def address(self) -> Address:
        """Return a new address of conversations."""
        return Address(self._listening)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise ValueError when the agent has a parameter that is neither a column nor has a default."""
        check_needs({f"multi_turn.agent: `{self.name}`": self._needs}, list(columns))

    def _call(self, action: str, arguments: dict[str, object]) -> Call:
        # a conversation that ran again would add its turns to those that it has
        return Call(self._host, self._options, action, arguments, self._seconds, _LANE, repeats=action == "describe")

    async def converse(self, address: Address, seat: Seat, fail: Callable[[Trajectory, str], None]) -> None:
        """Let the agent have a conversation, and set how it ended and the agent's reward. `fail` gets the reason of a
        failure. Raises the engine's error if it failed."""
        trajectory = seat.trajectory
        prompt, trajectory.rewards = trajectory.prompt, {} if self.roles else {self.name: 0.0}
        trajectory.outputs = dict.fromkeys(self._outputs)
        async with address.seated(seat) as key:
            client = {"base_url": address.url, "api_key": key, "model": POLICY_NAME}
            arguments = prompt.columns | {"prompt": prompt.messages}
            call = self._call("call", {"client": client, "arguments": arguments})
            running = asyncio.wrap_future(self._pool.submit(call))
            try:
                await asyncio.wait((running, seat.broken), return_when=asyncio.FIRST_COMPLETED)
                if seat.broken.done():
                    seat.broken.result()
                outcome = running.result()
            finally:
                running.cancel()
        if outcome.kind == "timeout":
            trajectory.ended = "time_limit"
        elif outcome.kind == "result" and self._host is PROGRAM_HOST:
            self._end(trajectory, fail, **outcome.value)
        elif outcome.kind == "result" and trajectory.samples:
            self._reward(trajectory, outcome.value, fail)
        elif outcome.kind == "result" or not trajectory.limit:
            fail(trajectory, NO_REQUEST if outcome.kind == "result" else str(outcome.value))
        else:  # it raised because of the limit
            trajectory.ended = trajectory.limit

    def _end(
        self,
        trajectory: Trajectory,
        fail: Callable[[Trajectory, str], None],
        value: Any,
        ended: str,
        failure: str,
        outputs: dict[str, str | None],
    ) -> None:
        """Set how a program has ended, and the reward of what it has left, also if it ran into a limit."""
        trajectory.outputs = outputs
        if failure and not trajectory.limit:
            fail(trajectory, failure)
        elif not trajectory.samples and ended == "done":
            fail(trajectory, NO_REQUEST)
        else:
            trajectory.ended = trajectory.limit if failure and ended == "done" else ended
            trajectory.rewards = {self.name: value if trajectory.samples else 0.0}

    def _reward(self, trajectory: Trajectory, value: Any, fail: Callable[[Trajectory, str], None]) -> None:
        """Set the rewards that the agent returned; by role, those of the roles that have taken a turn."""
        if not self.roles:
            trajectory.ended, trajectory.rewards = "done", {self.name: value}
            return
        spoken, silent = trajectory.spoken, set[str]() if value is None else value.keys() - trajectory.spoken
        value = dict.fromkeys(spoken) if value is None else value
        if silent:
            fail(trajectory, f"`{self.name}` returned a reward for the role {min(silent)}, which took no turn")
        elif missing := [role for role in spoken if role not in value]:
            fail(trajectory, f"`{self.name}` returned no reward for the role {missing[0]}, which took a turn")
        else:
            trajectory.ended, trajectory.rewards = "done", value


class _FirstRequest(Exception):
    """Ends a conversation at its first request, with the tokens that the policy would continue."""


def first_request(agent: Agent, trajectory: Trajectory) -> tuple[int, ...]:
    """Run the agent up to its first request, and return the tokens that the policy would continue. Raises ValueError
    with the reason if it asks for nothing."""
    reasons = list[str]()

    async def turn(prompt: Prompt, *_: object) -> tuple[Rollout, float]:
        raise _FirstRequest(prompt.token_ids)

    async def read_calls(prompt: Prompt, rollout: Rollout, tools: object) -> tuple[str, list[dict[str, object]]]:
        return rollout.text, []

    async def converse() -> tuple[int, ...]:
        seat = Seat(trajectory, SamplingParams(1.0, 1), turn, read_calls)
        try:
            await agent.converse(agent.address(), seat, lambda _, reason: reasons.append(reason))
        except _FirstRequest as request:
            return request.args[0]
        reason = reasons[0] if reasons else f"it ended by {trajectory.ended}"
        raise ValueError(f"multi_turn.agent: `{agent.name}` on row {trajectory.prompt.prompt_id}: {reason}")

    try:
        return asyncio.run(asyncio.wait_for(converse(), IMPORT_SECONDS))
    except TimeoutError:
        reason = f"`{agent.name}` has asked the policy for nothing in {IMPORT_SECONDS:g} s"
        raise ValueError(f"multi_turn.agent: {reason}") from None


def first_ask(prompt: Prompt) -> Ask:
    """Return a request for a token, for an agent that has asked for nothing."""
    return Ask([plain(message) for message in as_messages(prompt.messages, None)], [], max_tokens=1)
