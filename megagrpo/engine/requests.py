"""Requests for responses to prompts: one request per response, and the groups that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from megagrpo.data.tokens.sampling import own_sampling
from megagrpo.data.tokens.thinking import is_thinking
from megagrpo.engine.http.protocol import derive_seed
from megagrpo.engine.image_features import image_features, image_names
from megagrpo.engine.responses import Response, find_ending, heard_tokens
from megagrpo.types import Prompt, SamplingParams

# Gets new tokens of a response as they come: the place of the first one in the response, and their ids. After a server
# has failed, the response begins again.
OnTokens = Callable[[int, list[int]], None]
_encode = msgspec.json.Encoder().encode


@dataclass(eq=False)
class GroupRequest:
    """Everything that the requests for `n` responses to one prompt share.

    `version` is the weight version when the call began.
    """

    prompt: Prompt
    n: int
    sampling: SamplingParams
    seed: int
    version: int

    def __post_init__(self) -> None:
        self.sampling = own_sampling(self.sampling, self.prompt.sampling)

    def requests(self) -> list[Request]:
        """Return the request for each response."""
        return [Request(self, number) for number in range(self.n)]

    @cached_property
    def prompt_json(self) -> msgspec.Raw:
        """The prompt's token ids as JSON, encoded once for all requests."""
        return msgspec.Raw(_encode(self.prompt.token_ids))

    @cached_property
    def features_json(self) -> msgspec.Raw:
        """The prompt's images as JSON, encoded once for all requests."""
        return msgspec.Raw(_encode(image_features(self.prompt.inputs)))

    @cached_property
    def image_names_json(self) -> msgspec.Raw:
        """The names of the prompt's images as JSON, for a server that has their pixels."""
        return msgspec.Raw(_encode(image_names(self.prompt.inputs)))

    def upload(self, request_id: str, model: str | None = None) -> bytes:
        """Return a request for one token, as JSON, which sends the prompt's images to a server."""
        params = sampling_params(SamplingParams(1.0, 1)) | {"max_tokens": 1}
        body = {"token_ids": self.prompt_json, "sampling_params": params, "request_id": request_id}
        return _encode(body | ({} if model is None else {"model": model}) | {"features": self.features_json})


def sampling_params(sampling: SamplingParams) -> dict[str, Any]:
    """Return vLLM's parameters for one response, without seed and length."""
    params = {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.truncation.top_p,
        "top_k": sampling.truncation.top_k,
        "min_p": sampling.truncation.min_p,
        "stop_token_ids": sampling.stop_token_ids,
        "logprobs": 0,  # only the log-prob of the sampled token
        "detokenize": False,
        "repetition_penalty": sampling.repetition_penalty,  # always: Qwen2.5's generation_config.json has 1.05
    }
    if sampling.logit_bias:
        params["logit_bias"] = dict(sampling.logit_bias)
    if sampling.allowed_token_ids:
        params["allowed_token_ids"] = sampling.allowed_token_ids
    if sampling.constraint is not None:
        params["structured_outputs"] = dict([sampling.constraint])
    if sampling.stop:  # a server finds them in the text; `find_ending` also finds those that an interruption splits
        params |= {"stop": sampling.stop, "detokenize": True}
    return params


def longest_first(prompts: Sequence[Prompt]) -> list[int]:
    """Return the indices of prompts by the expected length of their responses, longest first. A prompt without an
    earlier visit counts as the mean of the others. Scheduling the longest first is within 4/3 of the best time (Graham,
    1969)."""
    known = [prompt.expected_length for prompt in prompts if prompt.expected_length]
    mean = sum(known) / max(1, len(known))
    return sorted(range(len(prompts)), key=lambda index: -(prompts[index].expected_length or mean))


@dataclass(eq=False)
class Request:
    """A request for response `number` of a group, and the number of its failed attempts.

    Its seed is the group's plus `number`: vLLM gives the responses of one request with n > 1 the same seeds. One that
    `is_pinned` goes to the data-parallel copy `copy` of its server; vLLM chooses the copy of others. With `on_tokens`
    the server sends the response in a stream.
    """

    group: GroupRequest
    number: int
    failures: int = 0
    is_pinned: bool = False
    copy: int | None = None
    on_tokens: OnTokens | None = None

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that choose the copy."""
        return {} if self.copy is None else {"X-data-parallel-rank": str(self.copy)}

    def max_tokens(self, first: Response | None = None, limit: int | None = None) -> int:
        """Return the most tokens of the response, or of the continuation of `first`."""
        sampling, written = self.group.sampling, 0 if first is None else first.token_ids.size
        most = sampling.max_tokens
        if sampling.thinking is not None and (first is None or first.forced is None):
            most = min(most, sampling.thinking.max_tokens)
        return limit or most - written

    def has_thought(self, response: Response) -> bool:
        """Whether a response has used up the budget of its thought, and may go on."""
        thinking, size = self.group.sampling.thinking, response.token_ids.size
        if thinking is None or response.forced is not None or response.finish_reason == "stop":
            return False
        return size == thinking.max_tokens < self.group.sampling.max_tokens

    def after_thought(self, response: Response, decode: Callable[[Sequence[int]], str]) -> Response:
        """Return a response that has used up the budget of its thought, with the tokens that end an open thought if
        there is room for them and an answer. A stop string that an interruption has split ends the response."""
        sampling, ids = self.group.sampling, response.token_ids.tolist()
        thinking, size = sampling.thinking, len(ids)
        assert thinking is not None, "the request has a budget"
        if find_ending(ids, decode, sampling.stop, sampling.include_stop).stop_string:
            return replace(response, finish_reason="stop")
        has_room = size + len(thinking.end_ids) < sampling.max_tokens
        if not has_room or not is_thinking(thinking, self.group.prompt, ids, decode):
            return replace(response, forced=(size, size))
        end = np.array(thinking.end_ids, np.int32)
        return replace(
            response,
            token_ids=np.concatenate([response.token_ids, end]),
            logprobs=np.concatenate([response.logprobs, np.zeros(end.size, np.float32)]),
            forced=(size, size + end.size),
        )

    def listener(self, first: Response | None = None) -> Callable[[bytes], None] | None:
        """Return what passes the lines of a stream on to `on_tokens`, if anything does. The stream may continue the
        aborted response `first`."""
        if (on_tokens := self.on_tokens) is None:
            return None
        place = 0 if first is None else first.token_ids.size

        def on_line(line: bytes) -> None:
            nonlocal place
            if ids := heard_tokens(line):
                on_tokens(place, ids)
                place += len(ids)

        return on_line

    def body(
        self,
        request_id: str,
        model: str | None = None,
        first: Response | None = None,
        limit: int | None = None,
        pixels: bool = True,
    ) -> bytes:
        """Return the request for the model of that name, if any, as JSON. With `first` it continues this aborted
        response, by at most `limit` tokens; the tokens of `first` join the prompt. Images have `pixels` or names."""
        group = self.group
        tokens, seed = group.prompt_json, group.seed + self.number
        if first is not None:
            written: Sequence[int] = first.token_ids.tolist()
            tokens = msgspec.Raw(_encode([*group.prompt.token_ids, *written]))
            seed = derive_seed(group.seed, self.number, len(written))
        params = sampling_params(group.sampling) | {"seed": seed, "max_tokens": self.max_tokens(first, limit)}
        more: dict[str, Any] = {} if model is None else {"model": model}
        more |= {} if self.on_tokens is None else {"stream": True}
        if group.prompt.inputs:
            more["features"] = group.features_json if pixels else group.image_names_json
        return _encode({"token_ids": tokens, "sampling_params": params, "request_id": request_id, **more})
