"""The tokens that structured outputs allow, computed from the tokens before them as vLLM computes them: by xgrammar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagrpo.config import RunConfig
from megagrpo.data.tokenizer import HuggingFaceTokenizer, Tokenizer, tokenizer_of

GRAMMAR = "rollout.structured_outputs"
MASK_BITS = 32
FIX = "install the xgrammar of vLLM's environment in the trainer's, or leave the key out"


class Grammar:
    """A compiled constraint of responses. `masks` walks the tokens of a turn in order: a pass reads each token once.
    Not thread-safe."""

    def __init__(self, constraint: tuple[str, str], tokenizer: Tokenizer, vocab_size: int):
        """`constraint` is `RolloutSection.constraint`, `vocab_size` the model's. Raises ValueError without xgrammar,
        for a constraint that it cannot compile, and for a tokenizer that it does not know."""
        kind, text = constraint
        try:
            import xgrammar  # imported late: it is part of vLLM's environment, and few runs need it
        except ImportError as error:
            raise ValueError(
                f"{GRAMMAR}: the trainer computes the allowed tokens with xgrammar: {error}; {FIX}"
            ) from error
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise ValueError(
                f"{GRAMMAR}: needs a tokenizer that vLLM loads; name a Hugging Face folder in model.tokenizer"
            )
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer.tokenizer, vocab_size=vocab_size)
        compiler = xgrammar.GrammarCompiler(info)
        verbs = {"json": "compile_json_schema", "regex": "compile_regex", "grammar": "compile_grammar"}
        try:
            compiled = getattr(compiler, verbs[kind])(text)
        except RuntimeError as error:
            raise ValueError(f"{GRAMMAR}.{kind}: xgrammar cannot compile it: {error}; correct it") from error
        self._matcher: Any = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(tokenizer.eos_token_ids))
        self.vocab_size, self._num_words = vocab_size, -(-vocab_size // MASK_BITS)
        self._read: tuple[object, int, int] = None, 0, 0  # sample and turn that the matcher reads, and its next token

    def masks(self, ids: np.ndarray, turn: int, position: int, count: int) -> Tensor:
        """Return [count, V / 32] int32 for the tokens after `position` of the turn that begins at index `turn` of the
        sample `ids` [L]: bit t of row i is set if token t may be at index position + 1 + i.

        Raises ValueError for a token that the constraint forbids: the servers used another one."""
        sample, begun, read = self._read
        if sample is not ids or begun != turn or read > position + 1:
            self._matcher.reset()
            read = turn
        masks = torch.full((count, self._num_words), -1, dtype=torch.int32)
        for index in range(read, position + count + 1):
            if self._matcher.is_terminated():  # an end token was accepted: vLLM allows all tokens after it
                break
            if index > position:
                self._matcher.fill_next_token_bitmask(masks, index - position - 1)
            if not self._matcher.accept_token(int(ids[index])):
                raise ValueError(
                    f"{GRAMMAR}: token {index - turn} of a response, id {ids[index]}, is one that the trainer's "
                    "xgrammar forbids; start the servers of rollout.urls with the trainer's version of xgrammar, with "
                    """--structured-outputs-config '{"backend": "xgrammar"}', and without --reasoning-parser"""
                )
        self._read = ids, turn, position + count + 1
        return masks


def allowed(masks: Tensor, tokens: Tensor) -> Tensor:
    """Return [n, t] bool: whether the rows of `masks` [n, V / 32] int32 allow the `tokens` [t] int64."""
    return (masks.index_select(1, tokens // MASK_BITS) >> (tokens % MASK_BITS)) & 1 == 1


def grammar_of(config: RunConfig, model_folder: Path, vocab_size: int) -> Grammar | None:
    """Return the grammar of `rollout.structured_outputs`, None without. Raises ValueError as `Grammar` does."""
    constraint = config.rollout.constraint
    return None if constraint is None else Grammar(constraint, tokenizer_of(config, model_folder), vocab_size)
