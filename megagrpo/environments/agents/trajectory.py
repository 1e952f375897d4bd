"""What an agent's conversation sampled: token sequences, found again by the messages that the agent sends back.

A request has all messages so far. If they begin with messages that ended at a recorded turn, and only messages of
others follow, the policy continues from the turn's exact tokens. Otherwise they are rendered in full, and a new sample
of the trajectory begins with these tokens as its prompt. No token that the policy sampled is tokenized again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megagrpo.data.tokens.chat_templates import PROMPT_TAIL, opened_thought
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.data.tokens.turn_tokens import FollowUps
from megagrpo.environments.episodes.conversation import Conversation
from megagrpo.platform.process.terminal import get_logger
from megagrpo.rewards.functions.text_rewards import encodable
from megagrpo.types import Prompt, Rollout

Message = dict[str, Any]
MOST_TOOL_SETS = 64  # that are kept, for agents whose tools change
log = get_logger(__name__)


class Refused(Exception):
    """A request that gets an error in OpenAI's format: `code`, and the HTTP status."""

    def __init__(self, message: str, code: str, status: int = 400, param: str | None = None):
        super().__init__(message)
        self.code, self.status, self.param = code, status, param


class Renderer:
    """Renders an agent's messages to token ids by `chat_template` (Jinja text), or by the tokenizer's own template."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None):
        self.tokenizer, self._template = tokenizer, chat_template
        self._follow_ups: dict[str, FollowUps] = {}  # by the tools as JSON
        self._has_warned = False  # of tools that the template does not show
        FollowUps(tokenizer, self._template, users=False)  # there is a template

    def whole(self, messages: Sequence[Message], tools: Sequence[Message], prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of all messages, and of the next turn's opening."""
        try:
            return self.tokenizer.render(shown(messages), None, self._template, tools, prompt.template_kwargs)
        except ValueError as error:
            raise Refused(str(error), "invalid_messages", param="messages") from error

    def suffix(
        self, messages: Sequence[Message], tools: Sequence[Message], prompt: Prompt, closed: bool
    ) -> tuple[int, ...] | None:
        """Return the tokens that these messages add after the policy's turn (`FollowUps.suffix`); None if the template
        changes the turn when they follow."""
        try:
            return self._of(tools).suffix(messages, prompt.template_kwargs, closed)
        except ValueError:
            return None

    def _of(self, tools: Sequence[Message]) -> FollowUps:
        key = json.dumps(tools, sort_keys=True)
        if key not in self._follow_ups:
            if len(self._follow_ups) >= MOST_TOOL_SETS:
                self._follow_ups.clear()
            try:
                self._follow_ups[key] = FollowUps(self.tokenizer, self._template, tools, users=False)
            except ValueError as error:
                if not self._has_warned:
                    log.warning("multi_turn.agent: %s", error)
                self._has_warned = True
                self._follow_ups[key] = FollowUps(self.tokenizer, self._template, tools, users=False, strict=False)
        return self._follow_ups[key]


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
    tools: str  # as JSON
    node: Node | None
    suffix: tuple[int, ...]
    cause: str = ""

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens that the policy continues."""
        return self.suffix if self.node is None else (*self.node.context, *self.suffix)


class Trajectory:
    """The samples of one conversation of an agent, about one prompt of the data set.

    `max_length` limits the tokens of a sample, `max_response` those after its prompt; `max_turns` all turns together.
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
    ):
        self.prompt, self.index, self.retries, self.samples = prompt, index, retries, list[Conversation]()
        self.ended, self.cause, self.rewards = "", "", dict[str, float | None]()  # as in `Dialogue`
        self.turns = 0  # that were asked for
        self.limit = ""  # which one was reached first, as in `Dialogue.ended`
        self.counts = Counter[str]()
        self._renderer, self._max_turns = renderer, max_turns
        self._max_length, self._max_response = max_length, max_response
        self._last: Conversation | None = None
        self._delivered: float | None = None  # when the agent got the last turn, until its next request
        self._asked: dict[tuple[str, bytes], Node] = {}  # what was asked with a history
        self._ended: dict[tuple[str, bytes], Node] = {}  # what ended with a history
        self._histories: set[bytes] = set()  # of `_ended`, with whatever tools

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._renderer.tokenizer.decode(ids)

    def start(self, messages: list[Message], tools: Sequence[Message], is_limited: bool = True) -> Start:
        """Find where the next turn of the policy begins. Raises Refused when there are too many tokens or, if the turn
        `is_limited`, too many turns."""
        if is_limited and self._max_turns is not None and self.turns >= self._max_turns:
            self.limit = self.limit or "max_turns"
            raise Refused(f"the conversation has had {self.turns} turns (multi_turn.max_turns)", "turn_limit_exceeded")
        start = self._find(messages, tools)
        if self.room(start) <= 0:
            self.limit = self.limit or "budget"
            raise Refused(
                f"the messages have {len(start.context)} tokens, which leaves no room for a turn: a sample has at most "
                f"{self._max_length} tokens, {self._max_response} of them after its first prompt "
                "(rollout.max_prompt_length, rollout.max_completion_length)",
                "context_length_exceeded",
                param="messages",
            )
        self.turns += 1
        if self._last is not None and self._delivered is not None:
            self._last.note(answered=time.monotonic() - self._delivered)
            self._delivered = None
        return start

    def room(self, start: Start) -> int:
        """Return the most tokens that the turn may have."""
        used = start.node.length + len(start.suffix) if start.node is not None and start.node.is_end else 0
        return min(self._max_length - len(start.context), self._max_response - used)

    def _find(self, messages: list[Message], tools: Sequence[Message]) -> Start:
        named, history = json.dumps(tools, sort_keys=True), histories(messages)
        if node := self._asked.get((named, history[-1])):
            return Start(messages, named, node, (), "fork")
        cause = "new"
        for count in range(len(messages) - 1, 0, -1):
            if messages[count]["role"] == "assistant":
                cause = "edited"  # no turn that is known ends after it
                break
            if node := self._ended.get((named, history[count - 1])):
                added = with_names(messages)[count:]
                suffix = self._renderer.suffix(added, tools, self.prompt, node.closed)
                if suffix is not None:
                    return Start(messages, named, node, suffix, "fork")
                cause = "template"
                break
            if history[count - 1] in self._histories:
                cause = "tools"
                break
        return Start(messages, named, None, self._renderer.whole(messages, tools, self.prompt), cause)

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
        self._asked[start.tools, histories(start.messages)[-1]] = Node(sample, len(sample.ids))
        sample.add_turn(rollout, self._renderer.tokenizer.decode, **times)
        sample.note(calls=tuple(call["function"]["name"] for call in message.get("tool_calls", ())))
        sample.messages[-1] = message
        self._delivered = time.monotonic()
        sample.ended = "length" if rollout.finish_reason == "length" else "done"
        closed = rollout.finish_reason == "stop" and not rollout.stop_string
        history = histories([*start.messages, message])[-1]
        self._ended[start.tools, history] = Node(sample, len(sample.ids), closed)
        self._histories.add(history)

    def _begin(self, start: Start) -> Conversation:
        tail = self._renderer.tokenizer.decode(start.context[-PROMPT_TAIL:], special=True)
        opened = opened_thought(tail, "")
        prompt = replace(self.prompt, token_ids=start.context, messages=start.messages, opened=opened)
        room = min(self._max_response, self._max_length - len(start.context))
        self.samples.append(Conversation(prompt, self.index, len(self.samples), start.messages, room))
        return self.samples[-1]

    def rollout(self) -> Rollout:
        """Return the trajectory: the sample of the last turn, with the others as its branches."""
        main = self._last
        assert main is not None, "a trajectory has a turn"
        main.ended, main.cause, main.rewards, main.retries = self.ended, self.cause, self.rewards, self.retries
        if self.ended == "length":
            main.finish_reason = "length"
        decode = self._renderer.tokenizer.decode
        whole = main.rollout(decode)
        counts = {f"agents/{name}": count for name, count in sorted(self.counts.items())}
        assert whole.dialogue is not None, "a conversation's rollout has a dialogue"
        others = tuple(sample.rollout(decode) for sample in self.samples if sample is not main)
        return replace(whole, dialogue=replace(whole.dialogue, counts=counts), branches=others)


# ------------------------------------------------------------------------------------------------------------- messages


def plain(message: Message) -> Message:
    """Return a message as OpenAI's clients may send it with text as its content, and without fields that have no value.

    Raises Refused for content other than text.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("each message must be an object with a role", "invalid_messages", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        if not all(map(_is_text, content)):
            raise Refused(
                "only text is supported as content: leave out images, audio and files",
                "unsupported_content",
                param="messages",
            )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise Refused("content must be text", "unsupported_content", param="messages")
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            raise Refused(f"{name} must be text", "invalid_messages", param="messages")
    if not all(map(_is_call, message.get("tool_calls") or ())):
        raise Refused(
            "tool calls must be calls of functions with a name, and with an id that is text",
            "invalid_messages",
            param="messages",
        )
    kept = {name: message[name] for name in ("name", "tool_calls", "tool_call_id") if message.get(name)}
    role = "system" if message["role"] == "developer" else message["role"]
    return {"role": role, "content": encodable(content or ""), **kept}


def _is_text(part: Any) -> bool:
    kinds = (None, "text", "input_text", "output_text")
    return isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str)


def _is_call(call: Any) -> bool:
    match call:
        case {"function": {"name": str()}}:
            return isinstance(call.get("id"), str | None)
    return False


def read_json(text: str) -> Any:
    """Return a JSON value whose texts have UTF-8 bytes: lone surrogates are replaced. Raises ValueError if it is not
    JSON."""
    value = json.loads(text)
    if "\\ud" in text.lower():
        value = json.loads(encodable(json.dumps(value, ensure_ascii=False)))
    return value


def histories(messages: Sequence[Message]) -> list[bytes]:
    """Return a digest of each beginning of the messages, by role, text, tool calls and the ids of calls."""
    digest, digests = hashlib.blake2b(digest_size=16), []
    for message in messages:
        calls = [[call.get("id"), call["function"]["name"], _arguments(call)] for call in message.get("tool_calls", ())]
        what = [message["role"], message["content"], calls, message.get("tool_call_id")]
        digest.update(json.dumps(what, sort_keys=True).encode() + b"\n")
        digests.append(digest.copy().digest())
    return digests


def with_names(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the names of the tools in the results, which some templates show."""
    names = {call.get("id"): call["function"]["name"] for m in messages for call in m.get("tool_calls", ())}
    return [
        {"name": names[m["tool_call_id"]], **m} if m.get("tool_call_id") in names and m["role"] == "tool" else m
        for m in messages
    ]


def shown(messages: Sequence[Message]) -> list[Message]:
    """Return the messages for a chat template: the arguments of calls as objects, as templates expect."""
    return [
        m | {"tool_calls": [_with_object(call) for call in m["tool_calls"]]} if "tool_calls" in m else m
        for m in with_names(messages)
    ]


def _with_object(call: Message) -> Message:
    return call | {"function": call["function"] | {"arguments": _arguments(call)}}


def _arguments(call: Message) -> Any:
    """Return a call's arguments as a value; as text if they are no JSON."""
    arguments = call["function"].get("arguments")
    try:
        return read_json(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
