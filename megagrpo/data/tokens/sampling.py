"""What responses are sampled from: the parameters of a run, changed by those of a row, and token ids of their texts."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megagrpo.config.sections.rollout import RolloutSection, constraint_of
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.types import Prompt, SamplingParams, Truncation


def sampling_of(rollout: RolloutSection, tokenizer: Tokenizer | None = None) -> SamplingParams:
    """Return the sampling parameters of a run. Without a tokenizer they have no end tokens, and texts of `logit_bias`
    are left out. Raises ValueError for texts that are not one token."""
    bias = rollout.logit_bias
    if tokenizer is None:
        bias = {token: added for token, added in bias.items() if isinstance(token, int)}
    return SamplingParams(
        rollout.temperature,
        rollout.max_completion_length,
        () if tokenizer is None else tokenizer.eos_token_ids,
        Truncation(rollout.top_p, rollout.top_k, rollout.min_p),
        tuple(rollout.stop),
        rollout.include_stop_str_in_output,
        tuple(bias_ids(bias, tokenizer, "rollout.logit_bias").items()),
        rollout.repetition_penalty,
        constraint_of(rollout.structured_outputs),
        tuple(rollout.allowed_token_ids),
        None if tokenizer is None else tokenizer.thinking,
    )


def own_sampling(sampling: SamplingParams, own: Mapping[str, Any]) -> SamplingParams:
    """Return `sampling` with the parameters of a prompt's row, `Prompt.sampling`. They replace those of the run, but
    `max_tokens` only lowers the limit, and `stop` adds texts."""
    if not own:
        return sampling
    cut, thinking = sampling.truncation, sampling.thinking
    return replace(
        sampling,
        temperature=own.get("temperature", sampling.temperature),
        max_tokens=min(sampling.max_tokens, own.get("max_tokens", sampling.max_tokens)),
        truncation=Truncation(own.get("top_p", cut.top_p), own.get("top_k", cut.top_k), own.get("min_p", cut.min_p)),
        stop=tuple(dict.fromkeys((*sampling.stop, *own.get("stop", ())))),
        logit_bias=_pairs(own["logit_bias"]) if "logit_bias" in own else sampling.logit_bias,
        repetition_penalty=own.get("repetition_penalty", sampling.repetition_penalty),
        constraint=constraint_of(own["structured_outputs"]) if "structured_outputs" in own else sampling.constraint,
        allowed_token_ids=tuple(own.get("allowed_token_ids", sampling.allowed_token_ids)),
        thinking=thinking and replace(thinking, max_tokens=own.get("max_thinking_tokens", thinking.max_tokens)),
    )


def _pairs(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    return tuple((int(token), added) for token, added in bias.items())


def sampling_row(prompt: Prompt) -> np.ndarray:
    """Return `Prompt.distribution`, and `Prompt.teachers` under this name, as words [n] int32 of JSON; no word if both
    are empty."""
    own = prompt.distribution | ({} if prompt.teachers is None else {"teachers": prompt.teachers})
    text = json.dumps(own).encode() if own else b""
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


def forbidden_token(sampling: SamplingParams, token_ids: Sequence[int]) -> int | None:
    """Return the index of the first token of a response that `allowed_token_ids` forbids; None without any."""
    allowed = set(sampling.allowed_token_ids)
    return next((index for index, token in enumerate(token_ids) if token not in allowed), None) if allowed else None
