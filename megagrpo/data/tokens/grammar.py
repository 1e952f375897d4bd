"""The tokens that structured outputs allow, computed from the tokens before them as vLLM computes them: by xgrammar."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagrpo.config import RunConfig
from megagrpo.data.tokens.tokenizer import Tokenizer, tokenizer_of

GRAMMAR = "rollout.structured_outputs"
MASK_BITS = 32
FIX = "install the xgrammar of vLLM's environment in the trainer's, or leave the key out"
CACHE_BYTES = 2**28  # of compiled constraints: a process forgets those that it has not used for the longest time


def xgrammar() -> Any:
    """Return the package. Raises ValueError without it."""
    try:
        import xgrammar as package  # imported late: it is part of vLLM's environment, and few runs need it
    except ImportError as error:
        raise ValueError(f"{GRAMMAR}: the trainer computes the allowed tokens with xgrammar: {error}; {FIX}") from error
    return package


class Grammars:
    """The constraints of responses. `masks` walks the tokens of a turn in order: a pass reads each token once. Each
    constraint is compiled once while xgrammar's cache has room. Not thread-safe."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, cache_bytes: int = CACHE_BYTES):
        """`vocab_size` is the model's. The tokenizer is loaded for the first constraint."""
        self.vocab_size, self._num_words = vocab_size, -(-vocab_size // MASK_BITS)
        self._load_tokenizer, self._cache_bytes = load_tokenizer, cache_bytes
        self._matcher: Any = None
        # what the matcher reads: constraint, sample and turn; and the index of its next token
        self._reads: tuple[tuple[str, str] | None, np.ndarray | None, int] = None, None, 0
        self._next = 0

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._load_tokenizer()

    @cached_property
    def compiler(self) -> Any:
        """xgrammar's compiler, which keeps what it has compiled."""
        info = xgrammar().TokenizerInfo.from_huggingface(self._tokenizer.tokenizer, vocab_size=self.vocab_size)
        return xgrammar().GrammarCompiler(info, cache_limit_bytes=self._cache_bytes)

    def compile(self, constraint: tuple[str, str]) -> Any:
        """Return a constraint, `SamplingParams.constraint`, compiled for the vocabulary. Raises ValueError without
        xgrammar, for a constraint that it cannot compile, and for a tokenizer that it does not know."""
        kind, text = constraint
        compiler = self.compiler
        verbs = {
            "json": compiler.compile_json_schema,
            "regex": compiler.compile_regex,
            "grammar": compiler.compile_grammar,
        }
        try:
            return verbs[kind](text)
        except RuntimeError as error:
            raise ValueError(f"{GRAMMAR}.{kind}: xgrammar cannot compile it: {error}; correct it") from error

    def masks(self, constraint: tuple[str, str], ids: np.ndarray, turn: int, position: int, count: int) -> Tensor:
        """Return [count, V / 32] int32 for the tokens after `position` of the turn that begins at index `turn` of the
        sample `ids` [L]: bit t of row i is set if token t may be at index position + 1 + i.

        Raises ValueError for a token that the constraint forbids: the servers used another one."""
        last, sample, begun = self._reads
        if last != constraint or sample is not ids or begun != turn or self._next > position + 1:
            stops = list(self._tokenizer.eos_token_ids)
            self._matcher = xgrammar().GrammarMatcher(self.compile(constraint), override_stop_tokens=stops)
            self._reads, self._next = (constraint, ids, turn), turn
        masks = torch.full((count, self._num_words), -1, dtype=torch.int32)
        for index in range(self._next, position + count + 1):
            if self._matcher.is_terminated():  # an end token was accepted: vLLM allows all tokens after it
                break
            if index > position:
                self._matcher.fill_next_token_bitmask(masks, index - position - 1)
            if not self._matcher.accept_token(int(ids[index])):
                self._reads = None, None, 0
                raise ValueError(
                    f"{GRAMMAR}: token {index - turn} of a response, id {ids[index]}, is one that the trainer's "
                    "xgrammar forbids; start the servers of rollout.urls with the trainer's version of xgrammar, with "
                    """--structured-outputs-config '{"backend": "xgrammar"}', and without --reasoning-parser"""
                )
        self._next = position + count + 1
        return masks


def allowed(masks: Tensor, tokens: Tensor) -> Tensor:
    """Return [n, t] bool: whether the rows of `masks` [n, V / 32] int32 allow the `tokens` [t] int64."""
    return (masks.index_select(1, tokens // MASK_BITS) >> (tokens % MASK_BITS)) & 1 == 1


def grammars_of(config: RunConfig, model_folder: Path, vocab_size: int) -> Grammars:
    """Return the grammars of a run."""
    return Grammars(partial(tokenizer_of, config, model_folder), vocab_size)
