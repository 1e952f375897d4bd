"""Tool calls parsed by vLLM: a server that was started with a tool parser extracts them from token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from megagrpo.engine.protocol import EngineError

DERENDER_ROUTE = "/v1/chat/completions/derender"
MAX_PARSE_REQUESTS = 64  # requests in flight

# The text outside of the calls, and the calls: {"name": ..., "arguments": JSON text}.
ToolCalls = tuple[str, list[dict[str, str]]]


async def read_tool_calls(
    client: httpx.AsyncClient, urls: Sequence[str], turns: Sequence[Sequence[int]], tools: Sequence[dict[str, Any]]
) -> list[ToolCalls]:
    """Return the content and the tool calls of each turn, in order. Turns are distributed over the servers. Raises
    EngineError when a server cannot parse tool calls or does not respond."""
    at_once = asyncio.Semaphore(MAX_PARSE_REQUESTS)

    async def read(index: int) -> ToolCalls:
        url = urls[index % len(urls)]
        async with at_once:
            try:
                answer = await client.post(f"{url}{DERENDER_ROUTE}", json=_request(turns[index], tools))
            except httpx.TransportError as error:
                raise EngineError(f"vLLM server {url} did not respond to {DERENDER_ROUTE}: {error!r}") from error
        if answer.status_code != 200:
            raise EngineError(
                f"vLLM server {url} cannot parse tool calls: {answer.text[:300]}; it must be started with "
                "--enable-scale-out, --enable-auto-tool-choice, --tool-call-parser and a tokenizer"
            )
        message = answer.json()["choices"][0]["message"]
        return message.get("content") or "", [call["function"] for call in message.get("tool_calls") or []]

    return await asyncio.gather(*map(read, range(len(turns))))


def _request(token_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": list(token_ids), "finish_reason": "stop"}
    chat = {
        "model": "policy",
        "messages": [{"role": "user", "content": ""}],
        "tools": list(tools),
        "tool_choice": "auto",
    }
    return {"model": "policy", "generate_response": {"request_id": "0", "choices": [choice]}, "chat_request": chat}
