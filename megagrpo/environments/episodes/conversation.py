"""One multi-turn response in progress: its tokens, which of them the policy wrote, and its messages."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from megagrpo.data.packing.routed_experts import joined_routes
from megagrpo.data.tokens.chat_templates import opened_thought
from megagrpo.data.tokens.turn_tokens import FollowUps
from megagrpo.rewards.functions.text_rewards import encodable
from megagrpo.types import Dialogue, Prompt, Rollout, Routes, Turn

Message = dict[str, Any]


@dataclass(eq=False)
class Conversation:
    """A multi-turn response in progress.

    `index` is its index among the responses to its prompt, `number` a unique id. `opening` are the prompt's messages.
    Tokens are only appended, with one exception: a scheduler may cut the end of the policy's last message. `ended` is
    the reason why the response is complete, "" while it continues.
    """

    prompt: Prompt
    index: int
    number: int
    opening: list[Message]
    max_length: int  # in tokens of the whole response, tool results and follow-up messages included
    ids: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: Routes | None = None  # as in `Rollout`, of the tokens that the engine has read so far
    messages: list[Message] = field(default_factory=list)
    message_start: int = 0  # index of the first token of the policy's last message
    is_open: bool = False  # whether the policy continues that message
    finish_reason: str = ""
    versions: list[tuple[int, int]] = field(default_factory=list)  # (first token, weight version that sampled it)
    stop_string: str | None = None  # as in `Rollout`
    forced: list[tuple[int, int]] | None = None  # as in `Rollout`
    turns: list[Turn] = field(default_factory=list)
    rewards: dict[str, float | None] = field(default_factory=dict)
    ended: str = ""
    cause: str = ""  # of a failure, as in `Dialogue`
    retries: int = 0  # earlier attempts
    role: str = ""  # as in `Dialogue`

    @property
    def prefix(self) -> Prompt:
        """The prompt for the engine to continue: the original prompt and the response so far."""
        prompt = self.prompt
        ids = (*prompt.token_ids, *self.ids)
        opened = prompt.opened if not self.ids else ""
        if self.is_open:
            opened = opened_thought("", self.messages[-1]["content"])
        first = prompt.prompt_id, ids, prompt.messages, prompt.columns
        return Prompt(*first, opened=opened, inputs=prompt.inputs, sampling=prompt.sampling)

    @property
    def room(self) -> int:
        """Number of tokens by which the response may still grow."""
        return self.max_length - len(self.ids)

    @property
    def all_messages(self) -> list[Message]:
        """The prompt's and the response's messages."""
        return [*self.opening, *self.messages]

    def turn_text(self, rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> str:
        """Return the text of the policy's message with this turn at its end. Changes nothing."""
        ids = rollout.response_ids.tolist()
        content = decode([*self.ids[self.message_start :], *ids] if self.is_open else ids)
        # characters after or of the stop string
        cut = len(decode(ids)) - len(rollout.text) if rollout.stop_string else 0
        return content[: len(content) - cut]

    def add_turn(self, rollout: Rollout, content: str, **times: Any) -> None:
        """Append a turn that the policy generated. `content` is its `turn_text`; `times` are fields of `Turn`."""
        if self.is_open:
            self.messages.pop()
        else:
            self.message_start = len(self.ids)
        ids = rollout.response_ids.tolist()
        for first, version in ((0, rollout.weight_version), *rollout.later_versions):
            if not self.versions or version != self.versions[-1][1]:
                self.versions.append((len(self.ids) + first, version))
        if rollout.forced is not None:
            before = len(self.ids)
            self.forced = [*(self.forced or ()), *((before + start, before + stop) for start, stop in rollout.forced)]
        self._append(ids, rollout.written.tolist(), rollout.rollout_logprobs.tolist())
        self.routes = joined_routes(self.routes, rollout.routes)
        self.messages.append({"role": "assistant", "content": content})
        self.finish_reason, self.stop_string = rollout.finish_reason, rollout.stop_string
        self.is_open = False
        start, stop = len(self.ids) - len(ids), len(self.ids)
        self.turns.append(Turn(start, stop, finish_reason=rollout.finish_reason, **times))

    def note(self, **facts: Any) -> None:
        """Set fields of the last turn."""
        self.turns[-1] = replace(self.turns[-1], **facts)

    def suffix(self, messages: list[Message], follow_ups: FollowUps) -> tuple[list[Message], tuple[int, ...]]:
        """Return messages of others, such as tool results, as UTF-8 texts, and their tokens after the policy's turn.
        Changes nothing."""
        messages = [message | {"content": encodable(message["content"])} for message in messages]
        return messages, follow_ups.suffix(messages, self.prompt.template_kwargs, closed=not self.stop_string)

    def add_suffix(self, messages: list[Message], ids: Sequence[int]) -> None:
        """Append messages with the tokens that `suffix` returned. When they leave no room for another turn, the
        response ends ("budget") without them."""
        if len(ids) >= self.room:
            self.ended = "budget"
            return
        self.extend(messages, ids)

    def extend(self, messages: Sequence[Message], ids: Sequence[int]) -> None:
        """Append messages of others with their tokens."""
        self._append(ids)
        self.messages += messages

    def following(self, messages: list[Message], follow_ups: FollowUps) -> Callable[[], None]:
        """Return what continues with the scheduler's `messages`: the conversation's own with new ones appended, or with
        another end of the policy's last message. Until it is called, nothing changes. Raises ValueError when the
        conversation cannot continue from these messages."""
        before = self.all_messages
        last = len(before) - 1
        if len(messages) < len(before) or messages[:last] != before[:last]:
            raise ValueError(
                "the scheduler changed earlier messages; it may add messages, or change the end of the policy's last "
                "one"
            )
        added, content = messages[last + 1 :], messages[last].get("content", "")
        if not all(
            isinstance(m, dict) and m.get("role") and isinstance(m.get("content"), str) for m in messages[last:]
        ):
            raise ValueError(
                f"the scheduler returned messages without a role, or with content other than text: "
                f"{messages[last:]!r:.200}"
            )
        if content == before[last]["content"]:
            if not added or added[-1]["role"] == "assistant":
                raise ValueError("the scheduler continues but adds no message that the policy could answer")
            return partial(self.add_suffix, *self.suffix(added, follow_ups))
        if added:
            raise ValueError(
                "the scheduler changed the policy's last message and added others; it may do one of the two"
            )
        content = encodable(content)
        unchanged = os.path.commonprefix([content, self.messages[-1]["content"]])  # noqa: RUF071 - texts, not paths
        count, text = follow_ups.tokens_within(self.ids[self.message_start :], unchanged)
        return partial(self._reopen, content, self.message_start + count, follow_ups.text(content[len(text) :]))

    def _reopen(self, content: str, stop: int, ids: Sequence[int]) -> None:
        """Let the policy continue its last message from `content`: from the first `stop` tokens and then `ids`."""
        if stop + len(ids) >= self.max_length:
            self.ended = "budget"
            return
        for row in (self.ids, self.written, self.logprobs):
            del row[stop:]
        if self.routes is not None:
            self.routes = self.routes[: len(self.prompt.token_ids) + stop]
        self.versions = self.versions[:1] + [part for part in self.versions[1:] if part[0] < stop]
        self.turns = [replace(turn, start=min(turn.start, stop), stop=min(turn.stop, stop)) for turn in self.turns]
        self.forced = self.forced and [(start, min(end, stop)) for start, end in self.forced if start < stop]
        self._append(ids)
        self.messages[-1] = {"role": "assistant", "content": content}
        self.is_open = True

    def _append(self, ids: Sequence[int], written: Sequence[bool] = (), logprobs: Sequence[float] = ()) -> None:
        self.ids += ids
        self.written += written or [False] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)

    def rollout(self, decode: Callable[[Sequence[int]], str]) -> Rollout:
        """Return the finished response as a Rollout."""
        dialogue = Dialogue(
            written=np.array(self.written, bool),
            messages=tuple(self.messages),
            turns=tuple(self.turns),
            ended=self.ended,
            rewards=self.rewards,
            cause=self.cause,
            retries=self.retries,
            role=self.role,
        )
        return Rollout(
            prompt=self.prompt,
            response_ids=np.array(self.ids, np.int32),
            rollout_logprobs=np.array(self.logprobs, np.float32),
            finish_reason=self.finish_reason,
            weight_version=self.versions[0][1],
            text=decode(self.ids),
            dialogue=dialogue,
            later_versions=tuple(self.versions[1:]),
            stop_string=self.stop_string,
            forced=None if self.forced is None else tuple(self.forced),
            routes=self.routes,
        )
