"""Finds the tokens that an assistant writes in a conversation, for any chat template: it is rendered turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from megagrpo.data.tokens.chat_templates import PLAIN_TEXT
from megagrpo.data.tokens.tokenizer import Tokenizer

Messages = list[dict[str, Any]]
Masked = tuple[list[int], list[bool]]  # token ids of a conversation, and whether the assistant writes each


def masked_text(tokenizer: Tokenizer, prompt: str, response: str) -> Masked:
    """Return the tokens of plain text: a prompt, and a response that an end token ends."""
    before, own = tokenizer.encode_once(prompt), tokenizer.encode(response, add_special_tokens=False)
    own += list(tokenizer.eos_token_ids[:1])
    return before + own, [False] * len(before) + [True] * len(own)


def masked_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    first: int = 0,
    template: str | None = None,
    tools: Sequence[dict[str, Any]] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Masked:
    """Return the tokens of a conversation, whose assistant writes the assistant's messages from number `first` on.

    A message begins where the prompt of the messages before it ends, as it does while an engine generates, and ends
    with its end token. The text before each begin and end is rendered alone, and must be the beginning of the whole
    text. Some templates render an earlier message otherwise than a last one (Qwen3 drops its thoughts): it then ends
    with the first end token after its begin. Raises ValueError for a template that renders otherwise, and for messages
    without an assistant's.
    """

    def rendered(count: int, generates: bool) -> str:
        text = tokenizer.rendered(
            messages[:count], None, template, tools, kwargs, ending="generate" if generates else "closed"
        )
        assert text is not None, "plain text has no messages"
        return text

    if template == PLAIN_TEXT or tokenizer.template(template, tools) is None:
        raise ValueError("data.chat_template: chat messages need a chat template; set Jinja text or a file")
    whole = rendered(len(messages), generates=False)
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant" and number >= first]
    cuts, exact = _borders(whole, turns, rendered)
    pieces = _pieces(tokenizer, whole, cuts)
    mask = [[False] * len(piece) for piece in pieces]
    for index, known in enumerate(exact):
        piece = pieces[2 * index + 1]
        ends = [place for place, token in enumerate(piece) if token in tokenizer.eos_token_ids]
        if not known and not ends:
            raise ValueError(
                "data.chat_template: an earlier message of the assistant is rendered otherwise than a last one, and "
                "no end token ends it, so its tokens cannot be told from others; change the template"
            )
        stop = (ends[-1] if known else ends[0]) + 1 if ends else len(piece)
        _check_text(tokenizer.decode(piece[:stop]), turns[index], messages[turns[index]])
        mask[2 * index + 1] = [place < stop for place in range(len(piece))]
        if not ends and pieces[2 * index + 2][:1] and pieces[2 * index + 2][0] in tokenizer.eos_token_ids:
            mask[2 * index + 2][0] = True  # GLM's messages end with the first token of the next one
    return [*chain(*pieces)], [*chain(*mask)]


def _check_text(text: str, number: int, message: dict[str, Any]) -> None:
    """Raise ValueError for a message of which the template shows no text, or not all calls of tools."""
    for call in message.get("tool_calls") or ():
        if (name := (call.get("function") or call).get("name", "")) not in text:
            raise ValueError(
                f"data.chat_template: message {number} of the assistant calls the tool {name}, which the template does "
                "not show; set a template for tools, or write the call as text"
            )
    if not text.strip():
        raise ValueError(f"message {number} of the assistant is empty; write one, or remove it")


def _borders(whole: str, turns: Sequence[int], rendered: Callable[[int, bool], str]) -> tuple[list[int], list[bool]]:
    """Return the begin and the end of each of the assistant's messages in the `whole` text, and whether the end is
    known; else it is the next begin. `rendered(n, generates)` is the text of the first n messages."""
    cuts, exact = list[int](), list[bool]()
    if turns and not turns[0]:
        raise ValueError("begins with a message of the assistant, which answers nothing; put the user's before it")
    for number in turns:
        begin, end = rendered(number, True), rendered(number + 1, False)
        if not whole.startswith(begin) or len(begin) < max(cuts, default=0):
            raise ValueError(
                f"data.chat_template: message {number} of the assistant does not begin where its prompt ends, so its "
                "tokens cannot be told from others; the template must add to the text of the messages before "
                f"(it renders the prompt {begin[-40:]!r})"
            )
        exact.append(whole.startswith(end) and len(end) > len(begin))
        cuts += [len(begin), len(end) if exact[-1] else len(begin)]
    if not cuts:
        raise ValueError("has no message of the assistant to learn from; add one, or remove the row")
    for index in [index for index, known in enumerate(exact) if not known]:
        cuts[2 * index + 1] = cuts[2 * index + 2] if index + 1 < len(exact) else len(whole)
    return cuts, exact


def _pieces(tokenizer: Tokenizer, text: str, cuts: Sequence[int]) -> list[list[int]]:
    """Return the tokens of the pieces of a text between `cuts`. Together they are the tokens of the text, unless a
    token of the text lies across a cut: then the piece before it is encoded alone, as a prompt is."""
    borders = [0, *cuts, len(text)]
    alone = [tokenizer.encode(text[start:stop], add_special_tokens=False) for start, stop in pairwise(borders)]
    if [*chain(*alone)] == tokenizer.encode(text, add_special_tokens=False):
        return alone
    ids, pieces = list[int](), list[list[int]]()
    for number, stop in enumerate(borders[1:]):
        until = tokenizer.encode(text[:stop], add_special_tokens=False)
        pieces.append(until[len(ids) :] if until[: len(ids)] == ids else alone[number])
        ids += pieces[-1]
    return pieces
