"""Tokenizes the messages appended to a conversation. Only new text is tokenized; existing tokens never change."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from megagrpo.data.tokens.tokenizer import PLAIN_TEXT, Tokenizer

Message = dict[str, Any]
_MARK = "3f9c1e"  # text that no template contains
_OPENING = {"role": "user", "content": "Question?"}


class FollowUps:
    """Continues conversations with a chat template, which gets `tools` (JSON schemas) as a variable.

    Raises ValueError that names the template if there is none, if it rewrites earlier turns when messages are added
    (some remove earlier thoughts), if it drops tool messages, or if it does not show the tools to the policy.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None,
        tools: Sequence[Message] = (),
        users: bool = True,
        strict: bool = True,
    ):
        """With `users`, user messages may follow a turn. With `tools`, tool messages may follow a turn. Without
        `strict` only `suffix` checks whether the template allows it."""
        self._tokenizer, self._tools = tokenizer, list(tools)
        template = tokenizer.template(chat_template, self._tools)
        self._name = "the tokenizer's chat template" if chat_template is None else "the template of data.chat_template"
        if template is None or template == PLAIN_TEXT:
            raise ValueError("data.chat_template: multi_turn needs a chat template; set Jinja text or a file")
        self._template = template
        if users and strict:
            self._check({"role": "user", "content": _MARK})
        if tools and strict:
            self._check({"role": "tool", "name": self._tool_name(), "content": _MARK})
            self._check_tools()

    def suffix(
        self, messages: Sequence[Message], kwargs: Mapping[str, Any] | None = None, closed: bool = True
    ) -> tuple[int, ...]:
        """Return the token ids of tool or user `messages` after an assistant's turn, and of the next turn's opening.

        The result starts with the template's text after the end-of-turn token, with which the policy's turn ended.
        Without `closed` a stop string ended the turn, and the result starts with that token. `kwargs` are variables of
        the template for this conversation.
        """
        end, added = self._suffix(messages, kwargs)
        return tuple(self._tokenizer.encode(added if closed else end + added, add_special_tokens=False))

    def text(self, text: str) -> tuple[int, ...]:
        """Return the token ids of text that is inserted into the assistant's turn."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def tokens_within(self, token_ids: Sequence[int], text: str) -> tuple[int, str]:
        """Return how many of a turn's tokens lie within its prefix `text`, and their text. End tokens never do."""
        decode = self._tokenizer.decode
        count = len(token_ids)
        while count and token_ids[count - 1] in self._tokenizer.eos_token_ids:
            count -= 1
        count = bisect_right(range(count + 1), len(text), key=lambda n: len(decode(token_ids[:n]))) - 1
        # part of a character decodes to another character
        while not text.startswith(whole := decode(token_ids[:count])):
            count -= 1
        return count, whole

    def _suffix(self, messages: Sequence[Message], kwargs: Mapping[str, Any] | None = None) -> tuple[str, str]:
        """Return the end-of-turn token as text ("" if the template writes none), and the text that `messages` add after
        the assistant's turn when a short conversation is rendered."""
        # some templates drop earlier thoughts
        turn: Message = {"role": "assistant", "content": "<think>\nSo.\n</think>\n\nYes."}
        # some templates look up the call of a result
        if names := [m.get("name", "tool") for m in messages if m["role"] == "tool"]:
            turn["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
        closed = self._render([_OPENING, turn], generate=False, kwargs=kwargs)
        whole = self._render([_OPENING, turn, *messages], generate=True, kwargs=kwargs)
        ends = filter(None, map(self._tokenizer.token_text, self._tokenizer.eos_token_ids))
        stop, end = max(
            ((closed.rfind(end) + len(end), end) for end in ends if end in closed),
            default=(len(closed), ""),
        )
        closed = closed[:stop]
        if not whole.startswith(closed):
            raise ValueError(
                f"data.chat_template: {self._name} changes an assistant's turn when a {messages[0]['role']} message "
                "follows it, so a conversation cannot continue from the tokens that the policy wrote; set a template "
                "that keeps every turn (docs/multi_turn.md)"
            )
        return end, whole[len(closed) :]

    def _render(self, messages: list[Message], generate: bool, kwargs: Mapping[str, Any] | None = None) -> str:
        from jinja2.exceptions import TemplateError  # not for ranks that load no tokenizer

        try:
            return self._tokenizer.apply_template(
                messages, self._template, "generate" if generate else "closed", self._tools, kwargs
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(
                f"data.chat_template: {self._name} cannot render a multi-turn conversation: {error}"
            ) from error

    def _check(self, message: Message) -> None:
        if _MARK not in self._suffix([message])[1]:
            raise ValueError(
                f"data.chat_template: {self._name} drops {message['role']} messages; set a template that renders them"
            )

    def _check_tools(self) -> None:
        if self._tool_name() not in self._render([_OPENING], generate=True):
            raise ValueError(
                f"data.chat_template: {self._name} does not show the tools to the policy (it does not use `tools`); "
                "set a template that does, such as configs/templates/hermes_tools.jinja"
            )

    def _tool_name(self) -> str:
        return self._tools[0]["function"]["name"]
