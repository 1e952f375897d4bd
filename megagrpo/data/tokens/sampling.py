"""What responses are sampled from: the parameters of a run, changed by those of a row, and token ids of their texts."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megagrpo.config.sections.rollout import MOST_IDS, MOST_WORDS, RolloutSection, constraint_of
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.types import Penalties, Prompt, SamplingParams, Truncation


def sampling_of(rollout: RolloutSection, tokenizer: Tokenizer | None = None) -> SamplingParams:
    """Return the sampling parameters of a run. Without a tokenizer they have no end tokens, and texts of `logit_bias`
    and `bad_words` are left out. Raises ValueError for texts that cannot be what their key says."""
    bias, words = rollout.logit_bias, rollout.bad_words
    if tokenizer is None:
        bias, words = {token: added for token, added in bias.items() if isinstance(token, int)}, []
    return SamplingParams(
        rollout.temperature,
        rollout.max_completion_length,
        () if tokenizer is None else tokenizer.eos_token_ids,
        Truncation(rollout.top_p, rollout.top_k, rollout.min_p),
        tuple(rollout.stop),
        rollout.include_stop_str_in_output,
        tuple(bias_ids(bias, tokenizer, "rollout.logit_bias").items()),
        Penalties(rollout.repetition_penalty, rollout.frequency_penalty, rollout.presence_penalty),
        constraint_of(rollout.structured_outputs),
        tuple(words),
        bad_word_ids(words, tokenizer, "rollout.bad_words"),
        tuple(rollout.allowed_token_ids),
        None if tokenizer is None else tokenizer.thinking,
    )


def own_sampling(sampling: SamplingParams, own: Mapping[str, Any]) -> SamplingParams:
    """Return `sampling` with the parameters of a prompt's row, `Prompt.sampling`. They replace those of the run, but
    `max_tokens` only lowers the limit, and `stop` adds texts."""
    if not own:
        return sampling
    old, cut, thinking = sampling.penalties, sampling.truncation, sampling.thinking
    return replace(
        sampling,
        temperature=own.get("temperature", sampling.temperature),
        max_tokens=min(sampling.max_tokens, own.get("max_tokens", sampling.max_tokens)),
        truncation=Truncation(own.get("top_p", cut.top_p), own.get("top_k", cut.top_k), own.get("min_p", cut.min_p)),
        stop=tuple(dict.fromkeys((*sampling.stop, *own.get("stop", ())))),
        logit_bias=_pairs(own["logit_bias"]) if "logit_bias" in own else sampling.logit_bias,
        penalties=Penalties(
            own.get("repetition_penalty", old.repetition),
            own.get("frequency_penalty", old.frequency),
            own.get("presence_penalty", old.presence),
        ),
        constraint=constraint_of(own["structured_outputs"]) if "structured_outputs" in own else sampling.constraint,
        bad_words=tuple(own.get("bad_words", sampling.bad_words)),
        bad_word_ids=tuple(map(tuple, own.get("bad_word_ids", sampling.bad_word_ids))),
        allowed_token_ids=tuple(own.get("allowed_token_ids", sampling.allowed_token_ids)),
        thinking=thinking and replace(thinking, max_tokens=own.get("max_thinking_tokens", thinking.max_tokens)),
    )


def _pairs(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    return tuple((int(token), added) for token, added in bias.items())


def sampling_row(prompt: Prompt) -> np.ndarray:
    """Return `Prompt.distribution` as words [n] int32 of JSON; no word if it is empty."""
    text = json.dumps(prompt.distribution).encode() if prompt.distribution else b""
    return np.frombuffer(text + b" " * (-len(text) % 4), np.int32)


def of_row(words: np.ndarray) -> dict[str, Any]:
    """Return the parameters in the words of `sampling_row`."""
    return json.loads(words.tobytes()) if words.size else {}


def bias_ids(bias: Mapping[int | str, float], tokenizer: Tokenizer | None, key: str) -> dict[int, float]:
    """Return a bias by token id. Raises ValueError, which begins with `key`, for a text that is not one token."""
    found: dict[int, float] = {}
    for token, added in bias.items():
        if isinstance(token, str):
            assert tokenizer is not None, "the caller leaves out texts without a tokenizer"
            ids = tokenizer.encode(token, add_special_tokens=False)
            if len(ids) != 1:
                raise ValueError(f"{key}: the text {token!r} is {len(ids)} tokens, {ids}; name one token, or its id")
            (token,) = ids
        if token in found:
            raise ValueError(f"{key}: names token {token} twice, by its id and by a text; leave one of them out")
        found[token] = added
    return found


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer | None, key: str) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of `bad_words` as vLLM's `SamplingParams.update_from_tokenizer` makes them: of each
    word, and of the word after a space if it then has as many tokens and another first one. Raises ValueError, which
    begins with `key`, for words that vLLM does not take."""
    found: list[tuple[int, ...]] = []
    for word in dict.fromkeys(words):
        assert tokenizer is not None, "the caller leaves out words without a tokenizer"
        plain, after_space = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        if not plain:
            raise ValueError(f"{key}: {word!r} has no tokens; leave it out")
        found.append(plain)
        if after_space and after_space[0] != plain[0] and len(after_space) == len(plain):
            found.append(after_space)
    if len(found) > MOST_WORDS or sum(map(len, found)) > MOST_IDS:
        raise ValueError(
            f"{key}: {len(found)} sequences of {sum(map(len, found))} tokens in all, and vLLM takes {MOST_WORDS} of "
            f"{MOST_IDS}; leave words out"
        )
    return tuple(found)


def token_problem(
    name: str, ids: Iterable[int], vocab_size: int | None, ends: Collection[int], stops: Collection[str]
) -> str | None:
    """Return what is wrong with the token ids of the parameter `name`: vLLM refuses ids outside of the vocabulary, and
    without an end token among `allowed_token_ids`, or a stop string, no response ends. None for valid ids."""
    ids = list(ids)
    outside = [] if vocab_size is None else [token for token in ids if token >= vocab_size]
    if outside:
        return f"{name}: token {outside[0]} is not in the model's vocabulary of {vocab_size}; leave it out"
    if name == "allowed_token_ids" and ids and not stops and not {*ids} & {*ends}:
        fix = f"add an end token, such as {ends[0]}" if (ends := list(ends)) else "set rollout.stop"
        return f"{name}: names no end token, so every response reaches its limit; {fix}"
    return None


def forbidden_token(sampling: SamplingParams, token_ids: Sequence[int]) -> tuple[int, str] | None:
    """Return the index of the first token of a response that `allowed_token_ids` or `bad_words` forbid, and the
    parameter's name; None without any."""
    allowed, endings = set(sampling.allowed_token_ids), {word[-1] for word in sampling.bad_word_ids}
    for index, token in enumerate(token_ids if allowed or endings else ()):
        if allowed and token not in allowed:
            return index, "allowed_token_ids"
        for word in sampling.bad_word_ids if token in endings else ():
            start = index + 1 - len(word)
            if start >= 0 and tuple(token_ids[start : index + 1]) == word:
                return index, "bad_words"
    return None
