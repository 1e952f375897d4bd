"""What an agent's conversation sampled: token sequences, found again by the messages that the agent sends back.

A request has all messages so far. If they begin with messages that ended at a recorded turn, and only messages of
others follow, the policy continues from the turn's exact tokens. Otherwise they are rendered in full, and a new sample
of the trajectory begins with these tokens as its prompt. No token that the policy sampled is tokenized again.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megagrpo.data.tokens.chat_templates import PROMPT_TAIL, opened_thought
from megagrpo.environments.agents.agent_messages import (
    Message,
    Refused,
    histories,
    history_after,
    with_names,
    write_json,
)
from megagrpo.environments.agents.agent_requests import POLICY_NAME
from megagrpo.environments.agents.renderer import Renderer, too_long
from megagrpo.environments.episodes.conversation import Conversation
from megagrpo.types import Prompt, Rollout


@dataclass(frozen=True)
class Node:
    """A place in a sample: before or after a turn of the policy, behind `length` tokens of its response."""

    sample: Conversation
    length: int
    closed: bool = True  # whether the turn ended with an end token

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens up to this place."""
        return (*self.sample.prompt.token_ids, *self.sample.ids[: self.length])

    @property
    def is_end(self) -> bool:
        """Whether the sample may go on here: the agent has not gone on from this place before."""
        return self.length == len(self.sample.ids)


@dataclass(frozen=True)
class Start:
    """Where the next turn begins: `suffix` continues `node`; without one it is the whole context.

    `cause` says why a sample begins, if one does: "new" (the history has no turn of the policy), "fork" (the agent has
    gone on from `node` before), "template" (it changes earlier turns), "tools" (others) or "edited" (the history).
    """

    messages: list[Message]
    history: bytes  # the digest of all messages
    tools: str  # as JSON, after the role and a line break
    node: Node | None
    suffix: tuple[int, ...]
    cause: str = ""

    @cached_property
    def context(self) -> tuple[int, ...]:
        """The tokens that the policy continues."""
        return self.suffix if self.node is None else (*self.node.context, *self.suffix)


class Trajectory:
    """The samples of one conversation of an agent, about one prompt of the data set.

    `max_length` limits the tokens of a sample, `max_response` those after its prompt; `max_turns` all turns together.
    With `roles` each sample has the turns of one of them.
    """

    def __init__(
        self,
        prompt: Prompt,
        index: int,
        renderer: Renderer,
        max_length: int,
        max_response: int,
        max_turns: int | None = None,
        retries: int = 0,
        roles: Sequence[str] = (),
    ):
        self.prompt, self.index, self.retries, self.samples = prompt, index, retries, list[Conversation]()
        self.ended, self.cause, self.rewards = "", "", dict[str, float | None]()  # as in `Dialogue`
        self.outputs = dict[str, str | None]()
        self._numbers = set[int]()  # of turns that the policy has taken or takes
        self._free = list[int]()  # heap of the numbers that were given up, below the largest one ever taken
        self.limit = ""  # which one was reached first, as in `Dialogue.ended`
        self.counts = Counter[str]()
        self.renderer, self._max_turns, self.roles = renderer, max_turns, roles
        self._max_length, self._max_response = max_length, max_response
        self._last: Conversation | None = None
        self._delivered: float | None = None  # when the agent got the last turn, until its next request
        self._asked: dict[tuple[str, bytes], Node] = {}  # what was asked with a history
        self._ended: dict[tuple[str, bytes], Node] = {}  # what ended with a history
        self._histories: set[tuple[str, bytes]] = set()  # of `_ended` by role, with whatever tools

    @property
    def spoken(self) -> list[str]:
        """The roles that have taken a turn."""
        return list(dict.fromkeys(sample.role for sample in self.samples))

    def role_of(self, model: str) -> str:
        """Return the role that a request for `model` has; "" without roles. Raises Refused for an unknown role."""
        prefix, _, role = model.partition(":")
        if not self.roles and prefix == POLICY_NAME and role:
            raise Refused(f"{model}: the run has no roles; list them in multi_turn.agent", "model_not_found", 404)
        if self.roles and (prefix != POLICY_NAME or role not in self.roles):
            names = ", ".join(f"{POLICY_NAME}:{name}" for name in self.roles)
            raise Refused(f"the model {model!r} names no role of multi_turn.agent; use {names}", "model_not_found", 404)
        return role if self.roles else ""

    @property
    def turns(self) -> int:
        """Number of turns that the policy has taken or takes."""
        return len(self._numbers)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self.renderer.tokenizer.decode(ids)

    def check_size(self, size: int, body: bytes = b"") -> None:
        """Raise Refused for a request with a body of `size` bytes that cannot fit into a sample. `body` is what has
        come of it."""
        self.renderer.check_size(size, body, self._max_length)

    def begin(self, start: Start, is_limited: bool = True) -> int:
        """Begin a turn of the policy, and return its number, which belongs to it until it is given up. Raises Refused
        when there are too many tokens or, if the turn `is_limited`, too many turns."""
        if is_limited and self._max_turns is not None and self.turns >= self._max_turns:
            self.limit = self.limit or "max_turns"
            raise Refused(f"the conversation has had {self.turns} turns (multi_turn.max_turns)", "turn_limit_exceeded")
        if self.room(start) <= 0:
            self.limit = self.limit or "budget"
            after = f"at most {self._max_response} of a sample's tokens come after its first prompt"
            raise too_long(f"the messages have {len(start.context)} tokens, and {after}", self._max_length)
        number = heapq.heappop(self._free) if self._free else len(self._numbers)
        self._numbers.add(number)
        if self._last is not None and self._delivered is not None:
            self._last.note(answered=time.monotonic() - self._delivered)
            self._delivered = None
        return number

    def give_up(self, number: int) -> None:
        """Take back a turn that was not recorded: the next one gets its number, and with it its seed."""
        self._numbers.remove(number)
        heapq.heappush(self._free, number)

    def note_refusal(self, error: Refused) -> None:
        """Remember a limit because of which a request was refused before its turn began."""
        if error.code == "context_length_exceeded":
            self.limit = self.limit or "budget"

    def room(self, start: Start) -> int:
        """Return the most tokens that the turn may have."""
        used = start.node.length + len(start.suffix) if start.node is not None and start.node.is_end else 0
        return min(self._max_length - len(start.context), self._max_response - used)

    def find(self, messages: list[Message], tools: Sequence[Message], role: str = "") -> Start:
        """Find where a turn of the policy in this `role` begins. It changes nothing, so it may run in another thread
        than the turns. Raises Refused for messages that cannot be rendered, and for far too many tokens."""
        named, found = f"{role}\n{write_json(tools, sort_keys=True)}", histories(messages)
        if node := self._asked.get((named, found[-1])):
            return Start(messages, found[-1], named, node, (), "fork")
        cause, node = "new", None
        for count in range(len(messages) - 1, 0, -1):
            if messages[count]["role"] == "assistant":
                cause = "edited"  # no turn that is known ends after it
                break
            if node := self._ended.get((named, found[count - 1])):
                added = with_names(messages)[count:]
                suffix = self.renderer.suffix(added, tools, self.prompt, node.closed, self._max_length)
                if suffix is not None:
                    return Start(messages, found[-1], named, node, suffix, "fork")
                cause = "template"
                break
            if (role, found[count - 1]) in self._histories:
                cause = "tools"
                break
        if node is not None:  # the template keeps this turn perhaps, because it has no thought to drop
            text = self.renderer.text(messages, tools, self.prompt)
            if (suffix := self.renderer.rest(node.context, text, self._max_length)) is not None:
                return Start(messages, found[-1], named, node, suffix, "fork")
        whole = self.renderer.whole(messages, tools, self.prompt, self._max_length)
        return Start(messages, found[-1], named, None, whole, cause)

    def record(self, start: Start, rollout: Rollout, message: Message, **times: float) -> None:
        """Keep a turn that began at `start`, and the assistant's `message` that the agent gets. `times` are fields of
        `Turn`."""
        node = start.node
        if node is None or not node.is_end:
            if self.samples:
                self.counts[f"branches/{start.cause}"] += 1
            node = Node(self._begin(start), 0)
        else:
            seen = len(node.sample.all_messages)
            node.sample.extend(start.messages[seen:], start.suffix)
        sample = self._last = node.sample
        self._asked[start.tools, start.history] = Node(sample, len(sample.ids))
        sample.add_turn(rollout, message["content"], **times)
        sample.note(calls=tuple(call["function"]["name"] for call in message.get("tool_calls", ())))
        sample.messages[-1] = message
        self._delivered = time.monotonic()
        sample.ended = "length" if rollout.finish_reason == "length" else "done"
        closed = rollout.finish_reason == "stop" and not rollout.stop_string
        history = history_after(start.history, message)
        self._ended[start.tools, history] = Node(sample, len(sample.ids), closed)
        self._histories.add((sample.role, history))

    def _begin(self, start: Start) -> Conversation:
        tail = self.renderer.tokenizer.decode(start.context[-PROMPT_TAIL:], special=True)
        opened = opened_thought(tail, "")
        prompt = replace(self.prompt, token_ids=start.context, messages=start.messages, opened=opened)
        room = min(self._max_response, self._max_length - len(start.context))
        role = start.tools.partition("\n")[0]
        self.samples.append(Conversation(prompt, self.index, len(self.samples), start.messages, room, role=role))
        return self.samples[-1]

    def rollout(self) -> Rollout:
        """Return the trajectory: the sample of the last turn, with the others as its branches."""
        main = self._last
        assert main is not None, "a trajectory has a turn"
        main.ended, main.cause, main.retries = self.ended, self.cause, self.retries
        main.rewards = self.rewards or dict.fromkeys(self.spoken, 0.0)
        if self.ended == "length":
            main.finish_reason = "length"
        decode = self.renderer.tokenizer.decode
        whole = main.rollout(decode)
        counts = {f"agents/{name}": count for name, count in sorted(self.counts.items())}
        assert whole.dialogue is not None, "a conversation's rollout has a dialogue"
        others = tuple(sample.rollout(decode) for sample in self.samples if sample is not main)
        return replace(whole, dialogue=replace(whole.dialogue, counts=counts, outputs=self.outputs), branches=others)
