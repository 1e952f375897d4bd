"""The trainer's side of schedulers, tools and environments. Workers run calls with deadlines; failures stop no run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megagrpo.config import MultiTurnSection
from megagrpo.environments.conversation import Conversation
from megagrpo.environments.environment_registry import targets
from megagrpo.environments.hosted import MALFORMED, is_valid
from megagrpo.platform.process.terminal import get_logger
from megagrpo.rewards.target import Target
from megagrpo.rewards.workers.pool import SHARED, Call, WorkerPool
from megagrpo.rewards.workers.values import reward_of

_HOSTED = Target("megagrpo.environments.hosted", "Hosted")
# A method of `Hosted` -> the verb whose values it returns; the argument `verb` of `act` is its own.
_VERBS = {"begin": "reset", "schedule": "step", "use_tool": "tool"}
TURNS = "turns"  # name of the scheduler's reward column
log = get_logger(__name__)
_GRACE = 5.0  # seconds after the deadline within which a worker must report an episode that missed it


class Responders:
    """A configuration's scheduler, tools and environment. Every method runs many conversations concurrently.

    The constructor loads them, and raises ValueError when one cannot be used. Call `close` at the end (or use `with`).
    """

    def __init__(self, section: MultiTurnSection, base_folder: str | Path | None = None):
        self.section = section
        self._scheduler, tools, environment = targets(section)
        self._options = dict(
            scheduler=self._scheduler, scheduler_args=section.scheduler_args, tools=tools, environment=environment
        )
        self._pool = WorkerPool(section.workers, None if base_folder is None else str(Path(base_folder).resolve()))
        try:
            ((described, failure),) = self._answers([self._call("describe", {}, section.timeout)])
            if failure is not None:
                raise ValueError(f"multi_turn: {failure}")
        except BaseException:
            self.close()
            raise
        self.tools: list[dict[str, Any]] = described["tools"]  # schemas of all tools
        self.reward_names: list[str] = described["reward_names"]
        self._methods: list[str] = described["methods"]  # names of the environment's tools
        # schemas of plain functions come first
        self._functions: list[str] = [schema["function"]["name"] for schema in self.tools[: len(tools)]]
        self._keeps_state: bool = described["keeps_state"]
        self._scheduler_is_class: bool = described["scheduler_is_class"]
        self._failed = ""
        if self._keeps_state:
            for lane in range(section.workers):
                self._pool.add_lane(f"episodes {lane}")

    @property
    def has_scheduler(self) -> bool:
        """Whether a scheduler decides what follows a turn without tool calls."""
        return self._scheduler is not None

    def begin(self, conversations: Sequence[Conversation]) -> list[str | None]:
        """Start the conversations' episodes, if needed. Returns the text to append to each prompt, or None."""
        self._failed = ""
        if not self._keeps_state:
            return [None] * len(conversations)
        calls = [self._episode("begin", c, dict(columns=c.prompt.columns)) for c in conversations]
        return self._values(conversations, calls)

    def schedule(
        self, conversations: Sequence[Conversation]
    ) -> list[tuple[list[dict[str, Any]], bool, float | None] | None]:
        """Call the scheduler on each last turn. Returns its answer; None if it fails, which ends the conversation."""
        answers = self._values(conversations, [self._step_call(c) for c in conversations])
        return [None if answer is None else tuple(answer) for answer in answers]

    def use_tools(
        self, conversations: Sequence[Conversation], calls: Sequence[Sequence[dict[str, Any]]]
    ) -> list[list[dict[str, Any]]]:
        """Run the tool calls of each conversation and return its tool messages, in order. The content is {"error": ...}
        for a call that fails. Counts calls and failures."""
        flat = [(c, self._checked(call)) for c, of_one in zip(conversations, calls, strict=True) for call in of_one]
        sound = [(c, call) for c, call in flat if "error" not in call]
        answers = iter(self._answers([self._tool_call(c, call) for c, call in sound]))
        messages: dict[int, list[dict[str, Any]]] = {c.number: [] for c in conversations}
        for conversation, call in flat:
            result, failure = (call, None) if "error" in call else next(answers)
            if failure is not None:
                result = {"error": failure}
                if call["name"] in self._methods:  # the environment's state is lost
                    self.fail(conversation, failure)
            conversation.tool_calls += 1
            conversation.tool_failures += "error" in result
            content = (
                result["result"] if "result" in result else json.dumps({"error": result["error"]}, ensure_ascii=False)
            )
            messages[conversation.number].append(
                {"role": "tool", "name": call.get("name", "unknown"), "content": content}
            )
        return list(messages.values())

    def finish(self, conversations: Sequence[Conversation]) -> None:
        """Set each conversation's reward columns and end its episode. As with reward functions, a failure gives 0."""
        names = [name for name in self.reward_names if name != TURNS]
        if names:
            values = self._values(
                conversations, [self._episode("act", c, dict(verb="reward", arguments={})) for c in conversations]
            )
            for conversation, rewards in zip(conversations, values, strict=True):
                conversation.rewards |= {name: (rewards or {}).get(name, 0.0) for name in names}
        if self.has_scheduler:
            for conversation in conversations:
                judged = [reward for reward in conversation.turn_rewards if reward is not None]
                try:
                    conversation.rewards[TURNS] = reward_of(math.fsum(judged)) if judged else None
                except ValueError as error:
                    self.fail(conversation, f"the sum of its turns' rewards: {error}")
                    conversation.rewards[TURNS] = 0.0
        if self._keeps_state:
            self._answers(
                [self._call("finish", dict(number=c.number), _GRACE, self._lane_of(c)) for c in conversations]
            )

    def fail(self, conversation: Conversation, reason: str) -> None:
        """End a conversation that cannot continue. The first one since `begin` is logged."""
        conversation.ended = "failed"
        if not self._failed:
            which = conversation.index, conversation.prompt.prompt_id
            log.warning(
                "multi_turn: response %d to prompt %d failed (counted in multi_turn/failures): %s", *which, reason
            )
        self._failed = self._failed or reason

    def close(self) -> None:
        """Kill the workers and with them the episodes. Safe to call twice."""
        self._pool.close()

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

    def _tool_call(self, conversation: Conversation, call: dict[str, Any]) -> Call:
        if call["name"] in self._methods:
            return self._episode("act", conversation, dict(verb=call["name"], arguments=call["arguments"]))
        return self._call("use_tool", dict(name=call["name"], arguments=call["arguments"]), self.section.timeout)

    def _step_call(self, conversation: Conversation) -> Call:
        left = None if self.section.max_turns is None else self.section.max_turns - conversation.turns
        arguments = conversation.prompt.columns | dict(
            messages=conversation.all_messages,
            turn=conversation.turns,
            turns_left=left,
            finish_reason=conversation.finish_reason,
        )
        if self._scheduler_is_class:
            return self._episode("act", conversation, dict(verb="step", arguments=arguments))
        return self._call("schedule", dict(arguments=arguments), self.section.timeout)

    def _episode(self, function: str, conversation: Conversation, arguments: dict[str, Any]) -> Call:
        """Build a call to an episode. The episode's process has the deadline; its worker gets `_GRACE` seconds more to
        report a miss."""
        arguments = dict(number=conversation.number, timeout=self.section.timeout) | arguments
        return self._call(function, arguments, self.section.timeout + _GRACE, self._lane_of(conversation))

    def _lane_of(self, conversation: Conversation) -> str:
        return f"episodes {conversation.number % self.section.workers}"

    def _call(self, method: str, arguments: dict[str, Any], timeout: float, lane: str = SHARED) -> Call:
        """Build a call of a method of `Hosted`."""
        return Call(_HOSTED, self._options, "call", {"method": method, "arguments": arguments}, timeout, lane)

    def _answers(self, calls: Sequence[Call]) -> list[tuple[Any, str | None]]:
        """Run the calls. Returns, in order, (value, None) or (None, reason of the failure) of each."""
        answers: list[tuple[Any, str | None]] = []
        for call, outcome in zip(calls, self._pool.run(calls), strict=True):
            verb = call.arguments["arguments"].get("verb") or _VERBS.get(call.arguments["method"])
            if outcome.kind != "result":
                answers.append((None, str(outcome.value)))
            elif verb and not is_valid(verb, outcome.value):
                answers.append((None, MALFORMED))
            else:
                answers.append((outcome.value, None))
        return answers

    def _values(self, conversations: Sequence[Conversation], calls: Sequence[Call]) -> list[Any]:
        """Run the calls and return their values. A call that fails gives None and ends its conversation."""
        answers = self._answers(calls)
        for conversation, (_, failure) in zip(conversations, answers, strict=True):
            if failure is not None:
                self.fail(conversation, failure)
        return [value for value, _ in answers]
