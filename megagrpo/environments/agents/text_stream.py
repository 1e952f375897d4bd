"""The text of a turn as its tokens come, without what later tokens may still change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # what a decoder gives for a character of which bytes are missing


class TextStream:
    """Turns tokens into text that the turn's text will begin with.

    Held back are incomplete characters, a possible beginning of a text of `stop`, and with `opening` everything from a
    possible tool call on, which begins with this text after spaces. None of the text is sent with `opening` None.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str], opening: str | None = ""):
        self._sent: list[str] = []
        self._decode, self._opening = decode, opening
        self._ends = [text for text in (*stop, opening) if text]
        self._is_over = opening is None  # nothing more is sent before the turn is complete
        self._ids: list[int] = []
        self._prefix = self._read = self._due = 0  # `_ids[_prefix:_read]` are decoded again, before those after them
        self._held = ""

    def add(self, first: int, ids: list[int]) -> str:
        """Take tokens of the response from index `first` on, and return the text to send. Tokens that were sent before,
        by a server that failed, must be the same; else nothing more is sent."""
        known = self._ids[first : first + len(ids)]
        self._is_over |= known != ids[: len(known)]
        self._ids += ids[len(known) :]
        if self._is_over or len(self._ids) < self._due:
            return ""
        before, after = (self._decode(self._ids[self._prefix : end]) for end in (self._read, None))
        if len(after) <= len(before) or after.endswith(INCOMPLETE):
            # look less often, the longer no character is complete: else the work grows with the square of the tokens
            self._due = len(self._ids) + (len(self._ids) - self._read) // 4
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return self._send(after[len(before) :])

    def _send(self, text: str) -> str:
        text = self._held + text
        found = [index for end in self._ends if (index := text.find(end)) >= 0]
        self._is_over = bool(found)
        count = min(found, default=len(text))
        if not found:
            count -= max((_overlap(text, end) for end in self._ends), default=0)
        if self._opening:
            count = len(text[:count].rstrip())
        self._held, text = text[count:], text[:count]
        self._sent.append(text)
        return text

    def finish(self, content: str) -> tuple[str, str]:
        """Return the turn's whole text, and what is left of it to send. `content` may lack spaces that were sent first.

        Raises ValueError if it begins with another text, because a server failed and the next one sampled other tokens.
        """
        sent = "".join(self._sent)
        if not content.startswith(sent):
            content = sent[: len(sent) - len(sent.lstrip())] + content
        if not content.startswith(sent):
            raise ValueError("a server failed during the response, and the one that replaces it sampled another one")
        return content, content[len(sent) :]


def _overlap(text: str, end: str) -> int:
    """Return the length of the longest end of `text` with which `end` begins; `text` does not contain `end`."""
    return next((n for n in range(min(len(text), len(end) - 1), 0, -1) if text.endswith(end[:n])), 0)
