"""What an agent asks for and what it gets, whichever of OpenAI's two protocols it speaks."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from megagrpo.environments.agents.agent_messages import Message, Refused
from megagrpo.types import SamplingParams

POLICY_NAME = "policy"  # the model's name; an agent may ask for any other
MOST_STOPS = 64  # stop strings of a request: the server looks for each one after every token
# Parameters of both protocols that do not influence the policy's turn.
_NO_INFLUENCE = (
    *("metadata", "model", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
    *("store", "stream", "stream_options", "user"),
)


@dataclass(frozen=True)
class Ask:
    """A request for the policy's next turn. `ignored` are parameters that would change the trained distribution."""

    messages: list[Message]  # as `plain` returns them
    tools: list[Message]  # JSON schemas, as in chat completions
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    parses_calls: bool = True
    model: str = POLICY_NAME
    ignored: tuple[str, ...] = ()
    is_retry: bool = False  # of a client that did not get the reply to the same request
    number: str = field(default_factory=lambda: secrets.token_hex(8))  # unique
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970


@dataclass(frozen=True)
class Reply:
    """A turn of the policy for the agent. `calls` are tool calls in OpenAI's format."""

    ask: Ask
    content: str
    calls: list[Message]
    finish_reason: str  # "stop", "length" or "tool_calls"
    prompt_tokens: int
    completion_tokens: int

    @property
    def message(self) -> Message:
        """The reply as an assistant's message."""
        return {"role": "assistant", "content": self.content} | ({"tool_calls": self.calls} if self.calls else {})


def ignored(body: Mapping[str, Any], sampling: SamplingParams, known: Collection[str]) -> tuple[str, ...]:
    """Return the parameters of a request that have no effect, because the agent is trained on what the policy samples,
    with the log-probs of the run's distribution: those with another value than the run's sampling, and those that are
    neither `known` to the protocol nor without influence on the policy's turn."""
    cut = sampling.truncation
    usual: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": cut.top_p,
        "top_k": cut.top_k,
        "min_p": cut.min_p,
    }
    usual |= {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}
    usual |= {"tool_choice": "auto", "parallel_tool_calls": True}
    given = {name: value for name, value in body.items() if value is not None and name not in (*known, *_NO_INFLUENCE)}
    changed = [
        n for n in given if n not in usual or (given[n] != usual[n] and (n, given[n]) != ("tool_choice", "none"))
    ]
    return tuple(name if re.fullmatch(r"\w{1,40}", name) else "other" for name in changed)


def refuse(body: Mapping[str, Any], *names: str) -> None:
    """Raise Refused if the request has one of these parameters, which the address does not support."""
    for name in names:
        if body.get(name):
            raise Refused(f"{name} is not supported here: leave it out", "unsupported_parameter", param=name)


def is_plain_text(wanted: Any) -> bool:
    """Whether a request asks for a response in no other format than text."""
    return not wanted or (isinstance(wanted, dict) and wanted.get("type") == "text")


def positive(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these limits that the request has. Raises Refused for one that is no positive number."""
    for name in names:
        if (value := body.get(name)) is not None:
            if type(value) is not int or value < 1:
                raise Refused(f"{name} must be a positive integer, not {value!r}", "invalid_value", param=name)
            return value
    return None


def checked_tools(tools: Any) -> list[Message]:
    """Return tools in the format of chat completions. Raises Refused for one that is no function."""
    if not isinstance(tools, list | None) or not all(map(_is_function, tools or ())):
        raise Refused(
            'tools must be a list of functions: {"type": "function", "function": {"name": text, "description": text, '
            '"parameters": JSON schema}}; of the Responses API without "function"',
            "unsupported_parameter",
            param="tools",
        )
    return list(tools or ())


def _is_function(tool: Any) -> bool:
    match tool:
        case {"function": {"name": str() as name} as function}:
            described = isinstance(function.get("description"), str | None)
            return bool(name) and described and isinstance(function.get("parameters"), dict | None)
    return False


def checked_stop(stop: Any) -> tuple[str, ...]:
    """Return a request's stop strings. Raises Refused for others than texts with characters."""
    listed = [stop] if stop and isinstance(stop, str) else stop or []
    is_list = isinstance(listed, list) and len(listed) <= MOST_STOPS
    if not is_list or not all(isinstance(text, str) and text for text in listed):
        reason = f"stop must be a text or a list of at most {MOST_STOPS} texts, each with characters"
        raise Refused(reason, "invalid_value", param="stop")
    return tuple(listed)
