"""From a server's response to a rollout: weight versions, where it ends, and its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megagrpo.data.packing.routed_experts import InvalidRoutes, RouteShape
from megagrpo.data.tokens.sampling import forbidden_token
from megagrpo.engine.http.protocol import EngineError
from megagrpo.engine.requests import Request
from megagrpo.engine.responses import InvalidResponse, Response, find_ending, read_response
from megagrpo.engine.server_updates import Updates
from megagrpo.types import Rollout, Routes

LARGEST_LOGPROB = 1e-4  # of rounding


@dataclass(frozen=True)
class Reader:
    """Reads the responses of the servers of `engine`. Its methods may run in any thread.

    `decode` turns response ids into text. With `any_version` weight versions are not checked, with `reads_no_versions`
    not read. With `routes` rollouts have the experts of their tokens.
    """

    engine: Updates
    decode: Callable[[Sequence[int]], str]
    any_version: bool = False
    routes: RouteShape | None = None
    reads_no_versions: bool = False

    def read(self, content: bytes, max_tokens: int) -> Response:
        """Return the response in a body. Raises InvalidResponse if it is malformed, or stale while servers may
        return."""
        response = read_response(content, max_tokens)
        others = self._other_versions(response)
        if self.engine.fleet.patience and others:  # the server was restarted and lacks the current weights
            raise InvalidResponse(f"it sampled with weight version {sorted(others)}")
        return response

    def rollout(self, url: str, request: Request, response: Response) -> Rollout:
        """Return the rollout of a complete response. Raises EngineError for a response that cannot be trained on."""
        group, ids = request.group, response.token_ids.tolist()
        prompt, sampling, reason = group.prompt, group.sampling, response.finish_reason
        begin, end = response.forced or (0, 0)
        count, text, stopped = find_ending(
            ids, self.decode, sampling.stop, sampling.include_stop, end if begin < end else 0
        )
        logprobs = response.logprobs[:count]
        problem = ""
        if reason not in ("stop", "length"):
            problem = f"ended prompt {prompt.prompt_id} with finish_reason {reason!r}"
        elif reason == "length" and count < sampling.max_tokens and not stopped and not response.cut:
            problem = (
                f"has no room for prompt {prompt.prompt_id}: {len(prompt.token_ids)} tokens and a response of "
                f"{sampling.max_tokens}; start it with a larger --max-model-len"
            )
        elif not count:
            problem = f"sent a response without tokens for prompt {prompt.prompt_id}"
        elif (invalid := np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB)))).size:
            first = f"{logprobs[invalid[0]]} at token {invalid[0]}"
            problem = f"sent invalid log-probs (NaN, inf or > 0) for prompt {prompt.prompt_id}: {first}"
        elif count < len(ids) and not response.joined:
            problem = (
                f"went on after the stop string {stopped!r} (rollout.stop); start it without --skip-tokenizer-init"
            )
        elif (forbidden := forbidden_token(sampling, written := ids[:begin] + ids[end:count])) is not None:
            fix = "other parameters may exclude all allowed tokens: allow more"
            said = f"sampled token {written[forbidden]}, which allowed_token_ids forbids"
            problem = f"{said}, for prompt {prompt.prompt_id}; {fix}"
        if problem:
            raise EngineError(f"{self.engine.name(url)} {problem}")
        routes = self._routes(url, request, response, count)
        version, *later = self._versions(url, request, response)
        return Rollout(
            prompt,
            response.token_ids[:count],
            logprobs,
            "stop" if stopped else reason,
            version[1],
            text,
            later_versions=tuple(part for part in later if part[0] < count),
            stop_string=stopped if sampling.stop else None,
            forced=None if sampling.thinking is None else ((begin, end),) * (begin < end),
            routes=routes,
        )

    def _routes(self, url: str, request: Request, response: Response, count: int) -> Routes | None:
        """Return the routes of the prompt and the first `count` tokens of the response, except the last token's. Raises
        EngineError for a route that is missing."""
        if self.routes is None:
            return None
        prompt = request.group.prompt
        try:
            return self.routes.checked(response.routes, len(prompt.token_ids) + count - 1)
        except InvalidRoutes as error:
            reason = f"prompt {prompt.prompt_id}, response {request.number} (rollout.routing_replay)"
            raise EngineError(f"{self.engine.name(url)} {error}; {reason}") from None

    def _versions(self, url: str, request: Request, response: Response) -> list[tuple[int, int]]:
        """Return (first token, weight version) of each part of a response.

        Raises EngineError for another version than the last sync's, for example after a user restarted a server; with
        `in_flight` earlier versions are valid too. A server that reports no version is assumed to have kept the weights
        it had when the request was made.
        """
        engine = self.engine
        if (others := self._other_versions(response)) and not self.any_version:
            expected = engine.reported_name(engine.weight_version)
            raise EngineError(
                f"{engine.name(url)} sampled with weight version {sorted(others)}; the last sync was {expected}"
            )
        if engine.in_flight is None or not response.spans or self.reads_no_versions:
            return [(0, engine.weight_version if engine.in_flight is None else request.group.version)]
        parts = [(span.start, int(span.version)) for span in response.spans]
        return [part for i, part in enumerate(parts) if i == 0 or part[1] != parts[i - 1][1]]

    def _other_versions(self, response: Response) -> set[str]:
        """Return the weight versions that sampled part of a response and are invalid. With `in_flight`, the server may
        know the next version before this client does, so that one is valid."""
        if self.reads_no_versions:
            return set()
        current = self.engine.weight_version
        others = {span.version for span in response.spans} - {self.engine.reported_name(current)}
        if self.engine.in_flight is None:
            return others
        return {version for version in others if not (version.isdigit() and 1 <= int(version) <= current + 1)}
