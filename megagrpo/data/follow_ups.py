"""What is appended to a conversation under way, in tokens: only new text is tokenised, what stands there already stays as it is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from megagrpo.data.tokenizer import PLAIN_TEXT, Tokenizer

Message = dict[str, Any]
_MARK = "3f9c1e"  # text that no template has of its own
_OPENING = {"role": "user", "content": "Question?"}


class FollowUps:
    """Continues conversations through a chat template, with `tools` (JSON schemas) among its variables.

    ValueError, naming the template, for one that cannot: that is none, that rewrites earlier turns when messages are added (some remove
    the thoughts of earlier turns), that leaves out a tool's message, or that shows the policy no tools.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None, tools: Sequence[Message] = (), users: bool = True):
        """`users` says whether messages of users may follow a turn; those of tools may where there are tools."""
        self._tokenizer, self._tools = tokenizer, list(tools)
        template = tokenizer.chat_template if chat_template is None else chat_template
        self._name = "the tokenizer's chat template" if chat_template is None else "the template of data.chat_template"
        if template is None or template == PLAIN_TEXT:
            raise ValueError("data.chat_template: responses of several turns need a chat template; give Jinja text or a file")
        self._template = template
        if users:
            self._check({"role": "user", "content": _MARK})
        if tools:
            self._check({"role": "tool", "name": self._tool_name(), "content": _MARK})
            self._check_tools()

    def suffix(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of `messages` (of tools or users) behind an assistant's turn, and of the next one's opening.

        The policy's turn ended with the token that ends turns; what the template writes after it comes first.
        """
        return tuple(self._tokenizer.encode(self._suffix(messages), add_special_tokens=False))

    def text(self, text: str) -> tuple[int, ...]:
        """Token ids of text that is put into the assistant's own turn."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def kept(self, token_ids: Sequence[int], text: str) -> tuple[int, str]:
        """How many of a turn's tokens lie wholly within its beginning `text`, and the text of these; an end token never does."""
        decode = self._tokenizer.decode
        count = len(token_ids)
        while count and token_ids[count - 1] in self._tokenizer.eos_token_ids:
            count -= 1
        count = bisect_right(range(count + 1), len(text), key=lambda n: len(decode(token_ids[:n]))) - 1
        while not text.startswith(whole := decode(token_ids[:count])):  # a character cut in two decodes to another
            count -= 1
        return count, whole

    def _suffix(self, messages: Sequence[Message]) -> str:
        """What rendering `messages` behind a short conversation adds after the end of the assistant's turn."""
        turn: Message = {"role": "assistant", "content": "<think>\nSo.\n</think>\n\nYes."}  # some templates drop thoughts later
        if names := [m.get("name", "tool") for m in messages if m["role"] == "tool"]:  # some look for the calls of a result
            turn["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
        closed = self._render([_OPENING, turn], generate=False)
        whole = self._render([_OPENING, turn, *messages], generate=True)
        ends = [closed.rfind(end) + len(end) for end in self._turn_ends() if end in closed]
        closed = closed[: max(ends)] if ends else closed
        if not whole.startswith(closed):
            raise ValueError(
                f"data.chat_template: {self._name} changes an assistant's turn when messages of a {messages[0]['role']} follow it, so "
                "that a conversation cannot go on from the tokens that the policy wrote; give one that keeps every turn "
                "(docs/multi_turn.md)"
            )
        return whole[len(closed) :]

    def _turn_ends(self) -> list[str]:
        return [text for text in map(self._tokenizer.token_text, self._tokenizer.eos_token_ids) if text]

    def _render(self, messages: list[Message], generate: bool) -> str:
        try:
            return self._tokenizer.apply_template(messages, self._template, "generate" if generate else "closed", self._tools)
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"data.chat_template: {self._name} cannot render a conversation of several turns: {error}") from error

    def _check(self, message: Message) -> None:
        if _MARK not in self._suffix([message]):
            raise ValueError(f"data.chat_template: {self._name} leaves out messages of a {message['role']}; give one that renders them")

    def _check_tools(self) -> None:
        if self._tool_name() not in self._render([_OPENING], generate=True):
            raise ValueError(
                f"data.chat_template: {self._name} does not show the policy its tools (it never looks at `tools`); give one that does, "
                "such as configs/templates/hermes_tools.jinja"
            )

    def _tool_name(self) -> str:
        return self._tools[0]["function"]["name"]
