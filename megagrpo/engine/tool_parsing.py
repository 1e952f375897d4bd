"""Tool calls parsed by vLLM: a server that was started with a tool parser extracts them from token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megagrpo.engine.http.connections import ConnectionFailed, Connections
from megagrpo.engine.http.protocol import EngineError

DERENDER_ROUTE = "/v1/chat/completions/derender"

# The route, the model or a parser is missing, or the request was not allowed: no other turn is read either. Any other
# status is about this turn: a parser may raise on the text of a policy.
CONFIGURATION = (401, 403, 404, 405, 501)

# The text outside of the calls, and the calls: {"name": ..., "arguments": JSON text}.
ToolCalls = tuple[str, list[dict[str, str]]]


class ToolParserFailed(EngineError):
    """vLLM's parser failed on the text of one turn."""


async def read_tool_calls(
    connections: Connections, url: str, turn: Sequence[int], tools: Sequence[dict[str, Any]]
) -> ToolCalls:
    """Return the content and the tool calls of a turn. Raises ToolParserFailed when the parser raises, EngineError when
    the server cannot parse tool calls, and ConnectionFailed when it does not respond."""
    try:
        answer = await connections.post(url, DERENDER_ROUTE, json.dumps(_request(turn, tools)).encode())
    except (ConnectionFailed, TimeoutError) as error:
        raise ConnectionFailed(f"vLLM server {url} did not respond to {DERENDER_ROUTE}: {error!r}") from error
    if answer.status != 200 and answer.status not in CONFIGURATION:
        reason = answer.content[:300].decode(errors="replace")
        raise ToolParserFailed(f"the parser of vLLM server {url} failed (status {answer.status}): {reason}")
    if answer.status != 200:
        raise EngineError(
            f"vLLM server {url} cannot parse tool calls: {answer.content[:300].decode(errors='replace')}; it must be "
            "started with --enable-scale-out, --enable-auto-tool-choice, --tool-call-parser and a tokenizer"
        )
    message = json.loads(answer.content)["choices"][0]["message"]
    return message.get("content") or "", [call["function"] for call in message.get("tool_calls") or []]


def _request(token_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": list(token_ids), "finish_reason": "stop"}
    chat = {"messages": [{"role": "user", "content": ""}], "tools": list(tools), "tool_choice": "auto"}
    return {"generate_response": {"request_id": "0", "choices": [choice]}, "chat_request": chat}
