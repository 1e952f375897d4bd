"""Texts of single tokens, so that the tokens of a response can be shown without its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from megagrpo.data.tokens.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what a tokenizer decodes from a part of a character
ANCHOR = "a"  # text before a token: tokenizers drop the space of a text's first token


class TokenTexts:
    """Returns the text of each token of a response. Texts of tokens that hold whole characters are cached."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode(ANCHOR, add_special_tokens=False)
        self._skipped = len(tokenizer.decode(self._anchor))
        self._known: dict[int, str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return one text per token. The first token of a character holds it, its other tokens are empty."""
        texts = [self._one(token) for token in token_ids]
        start = 0
        while start < len(texts):
            stop = start
            while stop < len(texts) and UNFINISHED in texts[stop]:
                stop += 1
            if stop > start + 1:
                texts[start:stop] = [self._decoded(token_ids[start:stop])] + [""] * (stop - start - 1)
            start = stop + 1
        return texts

    def _one(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decoded([token]) or self._tokenizer.token_text(token)
        return self._known[token]

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*self._anchor, *token_ids])[self._skipped :]
