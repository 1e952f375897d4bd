"""The trainer's side of schedulers, tools and environments. Workers run calls with deadlines; failures stop no run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megagrpo.config import MultiTurnSection
from megagrpo.environments.agents.agent import Agent
from megagrpo.environments.agents.trajectory import Trajectory
from megagrpo.environments.environment_registry import targets
from megagrpo.environments.episodes.conversation import Conversation
from megagrpo.environments.episodes.episode import is_valid
from megagrpo.environments.episodes.hosted import MALFORMED
from megagrpo.platform.process.terminal import get_logger
from megagrpo.rewards.registry.reward_values import reward_of
from megagrpo.rewards.registry.target import Target
from megagrpo.rewards.workers.pool import SHARED, Call, Outcome, WorkerPool
from megagrpo.row_image import without_images

_HOSTED = Target("megagrpo.environments.episodes.hosted", "Hosted")
# A method of `Hosted` -> the verb whose values it returns; the argument `verb` of `act` is its own.
_VERBS = {"begin": "reset", "schedule": "step", "use_tool": "tool"}
EPISODES = 1 << 16  # calls of episodes that one worker runs at once
TURNS = "turns"  # name of the scheduler's reward column
log = get_logger(__name__)
_START_SECONDS = 300.0  # timeout to describe the environment: a container's image may be pulled, a server started
_GRACE = 5.0  # seconds after the deadline within which a worker must report an episode that missed it


class Responders:
    """A configuration's scheduler, tools, environment or agent. Coroutines of many conversations run concurrently.

    The constructor loads them, and raises ValueError when one cannot be used. Call `close` at the end (or use `with`).
    """

    def __init__(self, section: MultiTurnSection, base_folder: str | Path | None = None):
        self.section = section
        scheduler, tools, environment = targets(section)
        self._options = dict(
            scheduler=scheduler,
            scheduler_args=section.scheduler_args,
            tools=tools,
            environment=environment,
            environment_args=section.environment_args,
            container=section.container,
            reuse=section.reuse_environments,
            close_seconds=section.timeout,
        )
        workers = 0 if section.agent else section.workers
        self._keeps_state = self._ends_slowly = False  # known when they are described
        if section.python and not shutil.which(section.python):
            raise ValueError(f"multi_turn.python: no program {section.python}; name the python of an environment")
        search_path = None if base_folder is None else str(Path(base_folder).resolve())
        self._pool = WorkerPool(workers, search_path, section.python)
        self.agent: Agent | None = None
        try:
            if section.agent:
                self.agent = Agent(section, self._pool)
            described = self._described()
        except BaseException:
            self.close()
            raise
        self.tools: list[dict[str, Any]] = described["tools"]  # schemas of all tools
        self.reward_names: list[str] = described["reward_names"]
        self._methods: list[str] = described["methods"]  # names of the environment's tools
        names = [schema["function"]["name"] for schema in self.tools]
        self._functions: list[str] = [name for name in names if name not in self._methods]
        self._keeps_state = described["keeps_state"]
        self._turns_keep_state: bool = described["turns_keep_state"]
        self.has_scheduler: bool = described["takes_turns"]  # a scheduler or `step` answers turns without tool calls
        self._logs_failure = self._logs_parser_failure = True
        self._ends_slowly = described["closes"] or section.container is not None
        if self._keeps_state:
            for lane in range(section.workers):
                self._pool.add_lane(f"episodes {lane}", capacity=EPISODES)

    def _described(self) -> dict[str, Any]:
        """Return what `Hosted.describe` returns."""
        if self.agent is not None:
            named = {"reward_names": self.agent.reward_names, "tools": [], "methods": []}
            return named | dict.fromkeys(("takes_turns", "turns_keep_state", "keeps_state", "closes"), False)
        call = self._call("describe", {"timeout": _START_SECONDS}, _START_SECONDS + _GRACE)
        described, failure = _read(call, *self._pool.run([call]))
        if failure is not None:
            raise ValueError(f"multi_turn: {failure}")
        return dict(described)

    def log_next_failure(self) -> None:
        """Log the next failure. Later ones are only counted."""
        self._logs_failure = True

    async def begin(self, conversation: Conversation) -> str | None:
        """Start the conversation's episode, if needed. Returns the text to append to the prompt, or None."""
        if not self._keeps_state:
            return None
        columns = {"prompt": conversation.opening} | conversation.prompt.columns
        text: str | None = await self._value(conversation, self._episode("begin", conversation, dict(columns=columns)))
        return text

    async def schedule(self, conversation: Conversation) -> tuple[list[dict[str, Any]], bool, float | None] | None:
        """Call the scheduler on the last turn. Returns its answer; None if it fails, which ends the conversation."""
        answer = await self._value(conversation, self._step_call(conversation))
        return None if answer is None else tuple(answer)

    async def use_tools(self, conversation: Conversation, calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run the tool calls of the last turn and return their tool messages, in order. The content is {"error": ...}
        for a call that fails. Counts calls and failures. Calls of the environment run one after another."""
        checked, one_by_one = [self._checked(call) for call in calls], asyncio.Lock()
        results = await asyncio.gather(*(self._result(conversation, call, one_by_one) for call in checked))
        turn = conversation.turns[-1]
        names = tuple(call.get("name", "unknown") for call in checked)
        contents = [
            result["result"] if "result" in result else json.dumps({"error": result["error"]}, ensure_ascii=False)
            for result in results
        ]
        limit = self.section.max_result_chars
        conversation.note(
            calls=(*turn.calls, *names),
            failures=turn.failures + sum("error" in result for result in results),
            shortened=turn.shortened + sum(limit is not None and len(content) > limit for content in contents),
        )
        pairs = zip(names, (shortened(content, limit) for content in contents), strict=True)
        return [{"role": "tool", "name": name, "content": content} for name, content in pairs]

    async def _result(
        self, conversation: Conversation, call: dict[str, Any], one_by_one: asyncio.Lock
    ) -> dict[str, Any]:
        """Return {"result": text} or {"error": text} of a tool call."""
        if "error" in call:
            return call
        if call["name"] not in self._methods:
            named = dict(name=call["name"], arguments=call["arguments"])
            result, failure = await self._answer(self._call("use_tool", named, self.section.timeout))
            return {"error": failure} if failure is not None else dict(result)
        async with one_by_one:
            used = self._episode("act", conversation, dict(verb="tool", arguments=call))
            result, failure = await self._answer(used)
        if failure is None:
            return dict(result)
        self.fail(conversation, failure)  # the environment's state is lost
        return {"error": failure}

    async def finish(self, conversation: Conversation) -> None:
        """Set the conversation's reward columns and end its episode. A failed one has 0 in each."""
        if (names := [name for name in self.reward_names if name != TURNS]) and conversation.ended != "failed":
            seen = dict(messages=conversation.all_messages, prompt_messages=len(conversation.opening))
            judged = self._episode("act", conversation, dict(verb="reward", arguments=seen))
            rewards = await self._value(conversation, judged) or {}
            conversation.rewards |= {name: rewards.get(name, 0.0) for name in names}
        if self.has_scheduler:
            given = [turn.reward for turn in conversation.turns if turn.reward is not None]
            try:
                conversation.rewards[TURNS] = reward_of(math.fsum(given)) if given else None
            except ValueError as error:
                self.fail(conversation, f"the sum of its turns' rewards: {error}")
        if conversation.ended == "failed":
            conversation.rewards |= dict.fromkeys(self.reward_names, 0.0)
        if self._keeps_state:
            await self._answer(self._end_call(conversation))

    def abandon(self, conversation: Conversation) -> None:
        """End the episode of a conversation that does not end. Does not wait for it."""
        if self._keeps_state:
            with contextlib.suppress(ValueError):  # the pool is closed
                self._pool.submit(self._end_call(conversation))

    def fail(self, conversation: Conversation | Trajectory, reason: str, cause: str = "") -> None:
        """End a conversation that cannot continue, for `cause`, one of CAUSES; its later failures change nothing. The
        first one after `log_next_failure` is logged."""
        if conversation.ended == "failed":
            return
        conversation.ended, conversation.cause = "failed", cause or cause_of(reason)
        if self._logs_failure:
            which = conversation.index, conversation.prompt.prompt_id
            counted = "retries" if conversation.retries < self.section.retries else "failures"
            log.warning(
                f"multi_turn: response %d to prompt %d failed (counted in multi_turn/{counted}): %s", *which, reason
            )
        self._logs_failure = False

    def note_parser_failure(self, reason: str) -> None:
        """Log the first turn whose tool calls vLLM's parser could not read. Each counts as an invalid call."""
        if self._logs_parser_failure:
            log.warning("multi_turn.tool_parser: %s; the turn counts as an invalid tool call", reason)
        self._logs_parser_failure = False

    def close(self) -> None:
        """End the episodes, which may close their environments, and kill the workers. Safe to call twice."""
        if self._keeps_state and self._ends_slowly:
            lanes, seconds = range(self.section.workers), self.section.timeout + _GRACE
            with contextlib.suppress(ValueError):  # the pool is closed
                self._pool.run([self._call("end_all", {}, seconds, f"episodes {lane}") for lane in lanes])
        self._pool.close()
        if self.agent is not None:
            self.agent.close()

    def __enter__(self) -> Responders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- calls

    def _checked(self, call: dict[str, Any]) -> dict[str, Any]:
        known = (*self._functions, *self._methods)
        if "error" in call or call["name"] in known:
            return call
        return {"error": f"unknown tool {call['name']}; known: {', '.join(known)}"}

    def _step_call(self, conversation: Conversation) -> Call:
        left = None if self.section.max_turns is None else self.section.max_turns - len(conversation.turns)
        columns = conversation.prompt.columns
        if self._turns_keep_state:  # `reset` got the images
            columns = without_images(columns)
        arguments = columns | dict(
            messages=conversation.all_messages,
            prompt_messages=len(conversation.opening),
            turn=len(conversation.turns),
            turns_left=left,
            finish_reason=conversation.finish_reason,
        )
        if self._turns_keep_state:
            return self._episode("act", conversation, dict(verb="step", arguments=arguments))
        return self._call("schedule", dict(arguments=arguments), self.section.timeout)

    def _episode(self, function: str, conversation: Conversation, arguments: dict[str, Any]) -> Call:
        """Build a call to an episode. The episode's process has the deadline; its worker gets `_GRACE` seconds more to
        report a miss."""
        arguments = dict(number=conversation.number, timeout=self.section.timeout) | arguments
        seconds = self.section.timeout + _GRACE
        if function == "begin" and self._ends_slowly:  # it may wait for an environment that is closing
            seconds *= 2
        return self._call(function, arguments, seconds, self._lane_of(conversation))

    def _end_call(self, conversation: Conversation) -> Call:
        return self._call("finish", dict(number=conversation.number), _GRACE, self._lane_of(conversation))

    def _lane_of(self, conversation: Conversation) -> str:
        return f"episodes {conversation.number % self.section.workers}"

    def _call(self, method: str, arguments: dict[str, Any], timeout: float, lane: str = SHARED) -> Call:
        """Build a call of a method of `Hosted`."""
        return Call(_HOSTED, self._options, "call", {"method": method, "arguments": arguments}, timeout, lane)

    async def _answer(self, call: Call) -> tuple[Any, str | None]:
        """Run the call. Returns (value, None), or (None, reason of the failure)."""
        answer = asyncio.wrap_future(self._pool.submit(call))
        if call.lane == SHARED:  # a cancelled call ends its worker
            return _read(call, await answer)
        return _read(call, await asyncio.shield(answer))  # other episodes live in the worker; `finish` ends this one

    async def _value(self, conversation: Conversation, call: Call) -> Any:
        """Run the call and return its value. A call that fails gives None and ends the conversation."""
        value, failure = await self._answer(call)
        if failure is not None:
            self.fail(conversation, failure)
        return value


def _read(call: Call, outcome: Outcome) -> tuple[Any, str | None]:
    """Return (value, None), or (None, reason of the failure)."""
    verb = call.arguments["arguments"].get("verb") or _VERBS.get(call.arguments["method"])
    if outcome.kind != "result":
        return None, str(outcome.value)
    return (None, MALFORMED) if verb and not is_valid(verb, outcome.value) else (outcome.value, None)


def cause_of(reason: str) -> str:
    """Return the cause, one of CAUSES, of a failure of a worker or an episode."""
    if reason == "no answer in time":
        return "timeout"
    if "broke the protocol" in reason:
        return "protocol"
    return "died" if reason.startswith(("its process", "the worker died")) else "raised"


def shortened(text: str, limit: int | None) -> str:
    """Return the text, without its middle and with a note instead if it has more than `limit` characters."""
    if limit is None or len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    return (
        f"{text[:head]}\n[... {len(text) - limit} of {len(text)} characters left out ...]\n{text[len(text) - tail :]}"
    )
