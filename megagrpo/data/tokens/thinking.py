"""Thoughts of reasoning models: the tags around them, and whether a thought is open when its budget ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megagrpo.data.tokens.chat_templates import PROMPT_TAIL
from megagrpo.types import Prompt, Thinking

if TYPE_CHECKING:
    from megagrpo.data.tokens.tokenizer import Tokenizer

# Texts that open and close a thought: of Qwen, DeepSeek and most others, Seed-OSS, MiniMax, Command A, Magistral.
PAIRS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
)
CALL = "<tool_call>"  # some models call a tool inside a thought: the call ends it


def thinking_of(
    max_tokens: int | None, end: str, max_completion_length: int, tokenizer: Tokenizer, asked: str
) -> Thinking | None:
    """Return the budget of thoughts that `end` or, if it is empty, their closing tag ends; None without one. The tags
    are a pair whose texts are tokens of the tokenizer, else one that `asked`, the chat template and system prompt, has.

    Raises ValueError for a model without such tags, and for an end that does not end a thought or leaves no room."""
    if max_tokens is None:
        return None
    key = "rollout.max_thinking_tokens"
    tokens = {tag: ids[0] for pair in PAIRS for tag in pair if (ids := _single(tag, tokenizer))}
    known = [pair for pair in PAIRS if tokens.keys() >= {*pair}]
    known += [pair for pair in PAIRS if any(tag in asked for tag in pair)]
    if not known:
        missing = "the model's tokenizer and chat template have no tags of a thought, such as <think> and </think>"
        raise ValueError(f"{key}: {missing}; name a reasoning model, or leave the key out")
    opening, closing = known[0]
    end = end or closing
    end_ids = tuple(tokenizer.encode(end, add_special_tokens=False))
    if closing not in end:
        raise ValueError(f"rollout.thinking_end: {end!r} has no {closing}, which closes this model's thoughts; add it")
    if ends := {*end_ids} & {*tokenizer.eos_token_ids}:
        text = tokenizer.token_text(min(ends))
        raise ValueError(f"rollout.thinking_end: {end!r} has the end token {text}, which ends responses; leave it out")
    if max_tokens + len(end_ids) >= max_completion_length:
        raise ValueError(
            f"{key}: {max_tokens} tokens and the {len(end_ids)} of {end!r} leave no room for an answer in "
            f"rollout.max_completion_length {max_completion_length}; lower it"
        )
    tags = tuple((tokens[tag], tag) for tag in known[0] if tag in tokens)
    return Thinking(max_tokens, opening, closing, end_ids, tags)


def _single(tag: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token of a tag; [] if it is several, or unknown."""
    ids = tokenizer.encode(tag, add_special_tokens=False)
    return ids if len(ids) == 1 and tokenizer.token_text(ids[0]) == tag else []


def is_thinking(
    thinking: Thinking, prompt: Prompt, response: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> bool:
    """Whether a response so far is a thought that has not ended. The prompt or the response begins it with the opening
    tag; the closing tag or a tool call ends it. Tags elsewhere in the prompt are texts of others."""

    def text(ids: Sequence[int]) -> str:
        """Return the text of tokens with the tags, which `decode` may leave out as special tokens."""
        tags, parts, start = dict(thinking.tags), list[str](), 0
        for index, token in enumerate(ids):
            if token in tags:
                parts += [decode(ids[start:index]), tags[token]]
                start = index + 1
        return "".join([*parts, decode(ids[start:])])

    written = text(response)
    is_opened = prompt.opened or text(prompt.token_ids[-PROMPT_TAIL:]).rstrip().endswith(thinking.opening)
    if not is_opened and not written.lstrip().startswith(thinking.opening):
        return False
    return thinking.closing not in written and CALL not in written
