"""The tools of an MCP server that speaks over stdin and stdout.

`multi_turn.environment: "mcp:python server.py"` starts a server per response. `multi_turn.tools: ["mcp:..."]` starts
one per worker, for tools that keep no state. API: https://modelcontextprotocol.io, package `mcp` 1.x and 2.x.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from typing import Any

from megagrpo.environments.episodes.episode import EnvironmentLost
from megagrpo.platform.process.variables import ENVIRONMENT

try:
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.types import PaginatedRequestParams
except ImportError as error:
    raise ImportError("multi_turn: mcp: pip install mcp") from error

# The server is in a session of its own. So that it dies with this process even if it hangs, the kernel kills it.
_TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


class McpServer:
    """An MCP server, started by the first call. `name` is its command, `env` adds to its environment variables."""

    def __init__(self, name: str, env: dict[str, str] | None = None):
        command = [sys.executable, "-c", _TIED, *shlex.split(name)]
        self._parameters = StdioServerParameters(
            command=command[0], args=command[1:], env={**ENVIRONMENT, **(env or {})}
        )
        self._name = name
        self._session: ClientSession | None = None
        self._task: asyncio.Task[None] | None = None

    async def reset(self) -> None:
        """Start a new server: the last response's server, and with it its state, ends."""
        await self._disconnect()
        await self._connected()

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools' schemas in OpenAI's format."""
        session = await self._connected()
        tools: list[Any] = []
        page = await session.list_tools()
        tools += page.tools
        while cursor := page.model_dump(by_alias=True).get("nextCursor"):
            page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            tools += page.tools
        return [_schema(tool.model_dump(by_alias=True)) for tool in tools]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool. Returns the text of its result. Raises RuntimeError for a result that is an error."""
        session = await self._connected()
        try:
            result = (await session.call_tool(name, arguments)).model_dump(by_alias=True)
        except Exception as error:
            try:
                await session.send_ping()
            except Exception:
                await self._disconnect()
                raise EnvironmentLost(f"the MCP server has ended ({self._name}): {error}") from error
            raise
        text = "\n".join(_text(content) for content in result["content"])
        if result.get("isError"):
            raise RuntimeError(text)
        return text

    async def close(self) -> None:
        """End the server."""
        await self._disconnect()

    async def _disconnect(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = self._session = None

    async def _connected(self) -> ClientSession:
        """Return the session, after starting the server if it does not run."""
        if self._session is None:
            ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(ready))
            begins: set[asyncio.Future[Any]] = {ready, self._task}
            await asyncio.wait(begins, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise EnvironmentLost(f"the MCP server does not start: {self._name}: {self._task.exception()}")
            self._session = ready.result()
        return self._session

    async def _run(self, ready: asyncio.Future[ClientSession]) -> None:
        """Hold the connection open until cancelled: one task must open and close it."""
        async with stdio_client(self._parameters) as streams, ClientSession(*streams) as session:
            await session.initialize()
            ready.set_result(session)
            await asyncio.Event().wait()


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["inputSchema"]}
    return {"type": "function", "function": function}


def _text(content: dict[str, Any]) -> str:
    return content["text"] if content.get("type") == "text" else f"[{content.get('type')}]"
