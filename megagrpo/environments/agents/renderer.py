"""Renders an agent's messages to token ids, at a cost that the tokens of a sample limit, whatever the agent sends."""

from __future__ import annotations

from collections.abc import Sequence

from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.data.tokens.turn_tokens import FollowUps
from megagrpo.environments.agents.agent_messages import Message, Refused, shown, write_json
from megagrpo.environments.episodes.text_threads import TextThreads
from megagrpo.platform.process.terminal import get_logger
from megagrpo.types import Prompt

MOST_TOOL_SETS = 64  # that are kept, for agents whose tools change
USUAL_CHARACTERS = 8  # per token: a text with more is tokenized from its beginning first
GROWTH = 4  # times the characters of the beginning that is tokenized next
LEAST_BODY = 1 << 21  # bytes that any request may have
_BYTES_PER_CHARACTER = 2  # of JSON: a text of the longest tokens is ASCII, and each character may be escaped
_FREE_OBJECTS = 1 << 12  # JSON objects of a request that need not be rendered
log = get_logger(__name__)


class Renderer:
    """Renders an agent's messages to token ids by `chat_template` (Jinja text), or by the tokenizer's own template.

    Its methods may be called in several threads; `threads` are for long texts.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None):
        self.tokenizer, self._template, self.threads = tokenizer, chat_template, TextThreads()
        self._longest = max(map(len, filter(None, tokenizer.pieces())))  # characters of a token
        self._follow_ups: dict[str, FollowUps] = {}  # by the tools as JSON
        self._has_warned = False  # of tools that the template does not show
        FollowUps(tokenizer, self._template, users=False)  # there is a template
        tokenizer.encode("", add_special_tokens=False)  # resets truncation, which must not happen beside other threads

    def check_size(self, size: int, body: bytes, max_length: int) -> None:
        """Raise Refused for a request of `size` bytes that can only have more than `max_length` tokens, before it is
        parsed. `body` is what has come of it. Each of its JSON objects, messages and parts of them, is at least half a
        token."""
        limit = max(LEAST_BODY, _BYTES_PER_CHARACTER * self._longest * max_length)
        if size > limit:
            raise too_long(f"the request has more than {limit} bytes", max_length)
        objects, most = body.count(b'{"'), 2 * max_length + _FREE_OBJECTS
        if objects > most:
            raise too_long(f"the request has {objects} JSON objects, more than {most}", max_length)

    def whole(
        self, messages: Sequence[Message], tools: Sequence[Message], prompt: Prompt, max_length: int
    ) -> tuple[int, ...]:
        """Return the tokens of all messages, and of the next turn's opening. Raises Refused, also for far more than
        `max_length` tokens."""
        return self._encoded(self.text(messages, tools, prompt), max_length)

    def text(self, messages: Sequence[Message], tools: Sequence[Message], prompt: Prompt) -> str:
        """Return the text of `whole`. Raises Refused."""
        try:
            text = self.tokenizer.rendered(shown(messages), None, self._template, tools, prompt.template_kwargs)
        except ValueError as error:
            raise Refused(str(error), "invalid_messages", param="messages") from error
        assert text is not None, "there is a template"
        return text

    def suffix(
        self, messages: Sequence[Message], tools: Sequence[Message], prompt: Prompt, closed: bool, max_length: int
    ) -> tuple[int, ...] | None:
        """Return the tokens that these messages add after the policy's turn (`FollowUps.suffix`); None if the template
        changes the turn when they follow. Raises Refused for far more than `max_length` tokens."""
        self._check_tokens("".join(message["content"] for message in messages), max_length)
        try:
            return self._of(tools).suffix(messages, prompt.template_kwargs, closed)
        except ValueError:
            return None

    def rest(self, context: Sequence[int], text: str, max_length: int) -> tuple[int, ...] | None:
        """Return the tokens of `text`, which `text` of all messages has returned, after those of `context`; None if the
        text of `context` is not its beginning."""
        before = self.tokenizer.decode(context, special=True)
        return self._encoded(text[len(before) :], max_length) if text.startswith(before) else None

    def _encoded(self, text: str, max_length: int) -> tuple[int, ...]:
        self._check_tokens(text, max_length)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _check_tokens(self, text: str, max_length: int) -> None:
        """Raise Refused for a text with far more than `max_length` tokens, when so many of its beginning are known."""
        size = USUAL_CHARACTERS * max_length
        while size < len(text):
            # the end that is cut off may change the tokens of one word
            most = max_length + _BYTES_PER_CHARACTER * self._longest
            if len(self.tokenizer.encode(text[:size], add_special_tokens=False)) > most:
                raise too_long(f"the first {size} of {len(text)} characters have more than {most} tokens", max_length)
            size *= GROWTH

    def _of(self, tools: Sequence[Message]) -> FollowUps:
        key = write_json(tools, sort_keys=True)
        if (known := self._follow_ups.get(key)) is not None:
            return known
        if len(self._follow_ups) >= MOST_TOOL_SETS:
            self._follow_ups.clear()
        try:
            made = FollowUps(self.tokenizer, self._template, tools, users=False)
        except ValueError as error:
            if not self._has_warned:
                log.warning("multi_turn.agent: %s", error)
            self._has_warned = True
            made = FollowUps(self.tokenizer, self._template, tools, users=False, strict=False)
        self._follow_ups[key] = made
        return made


def too_long(what: str, max_length: int) -> Refused:
    """Return the error of a request that cannot fit into a sample."""
    limit = f"a sample has at most {max_length} tokens (rollout.max_prompt_length, rollout.max_completion_length)"
    return Refused(f"{what}, which leaves no room for a turn: {limit}", "context_length_exceeded", param="messages")
