"""A client of OpenEnv's environment servers (Meta and Hugging Face), over their WebSocket.

    multi_turn:
      environment: examples/adapters/openenv_client.py:OpenEnv
      environment_args: {name: "http://HOST:PORT"}

Each response has a session of the server. Servers whose actions are MCP calls give the policy tools; with other servers
each turn of the policy is an action.
API: https://meta-pytorch.org/OpenEnv, packages `openenv` and `openenv-core`.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from megagrpo.environments.episodes.episode import INVALID_ACTION, EnvironmentLost

try:
    from openenv.core import GenericEnvClient
    from websockets.exceptions import ConnectionClosed
except ImportError as error:
    raise ImportError(f"multi_turn.environment: pip install openenv-core ({error})") from error

_MCP_ACTIONS = ("CallToolAction", "ListToolsAction", "Action")  # what servers of MCP tools call their actions


class OpenEnv:
    """One session of an environment server.

    An action is JSON, or the plain answer where the server's action has one required field or `field` names one.
    `show` names the fields of an observation that the policy sees; all by default. `columns` names the columns of the
    row that `reset` gets. `invalid` is the reward of an answer without an action. A tool call's rewards add up to the
    episode's reward, a turn's are the turn's.
    """

    def __init__(
        self,
        name: str,
        field: str | None = None,
        show: list[str] | None = None,
        columns: list[str] | None = None,
        invalid: float = 0.0,
        timeout: float = 60.0,
    ):
        self._url, self._show, self._columns, self._invalid = name.rstrip("/"), show, columns or ["seed"], invalid
        self._timeout, self._field, self._names_tools = timeout, field, False
        self._client: Any = None
        self._rewards, self._done = 0.0, False

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the schemas of the server's MCP tools, in OpenAI's format; none for a server with other actions."""
        await self._connect()
        if not self._names_tools:
            return []
        tools = (await self._ask(self._client.step({"type": "list_tools"}))).observation["tools"]
        return [{"type": "function", "function": _function(tool)} for tool in tools]

    async def reset(self, **columns: Any) -> str | None:
        """Begin an episode. Returns the first observation, for the end of the prompt."""
        given = {k: columns[k] for k in self._columns if k in columns}
        await self._connect()
        try:
            result = await self._ask(self._client.reset(**given))
        except EnvironmentLost:  # the server closed the session while the process waited for an episode
            self._client = None
            await self._connect()
            result = await self._ask(self._client.reset(**given))
        self._rewards, self._done = 0.0, result.done
        text = self._text(result.observation)
        return "\n" + text if text else None

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Call an MCP tool of the server. Raises RuntimeError with its error."""
        if self._done:
            raise RuntimeError("the episode has ended")
        result = await self._ask(self._client.step({"type": "call_tool", "tool_name": name, "arguments": arguments}))
        self._rewards, self._done = self._rewards + float(result.reward or 0.0), result.done
        if error := result.observation.get("error"):
            raise RuntimeError(error.get("message", str(error)) if isinstance(error, dict) else str(error))
        answer = result.observation.get("result")
        content = answer.get("content") if isinstance(answer, dict) else None
        if isinstance(content, list):
            return "\n".join(part.get("text", "") for part in content)
        return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)

    async def step(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool, float | None]:
        """Take the last message as an action. A server of MCP tools has no action for a message without calls."""
        if self._names_tools or self._done:
            return messages, True, None
        action = self._action(messages[-1]["content"].strip())
        try:
            result = None if action is None else await self._ask(self._client.step(action))
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):  # an action that does not fit the schema
                raise
            result = None
        if result is None:
            return [*messages, {"role": "user", "content": INVALID_ACTION}], False, self._invalid
        self._done = result.done
        answer = {"role": "user", "content": self._text(result.observation)}
        return [*messages, answer], result.done, float(result.reward or 0.0)

    def get_reward(self) -> float:
        """Return the sum of the rewards of tool calls."""
        return self._rewards

    async def close(self) -> None:
        """End the session, so that the server frees its place at once."""
        if self._client is not None:
            await self._client.close()

    async def _connect(self) -> None:
        if self._client is not None:
            return
        async with httpx.AsyncClient(timeout=self._timeout) as http:
            schema = (await http.get(f"{self._url}/schema")).raise_for_status().json()["action"]
        self._names_tools = schema.get("title") in _MCP_ACTIONS
        required = schema.get("required", [])
        self._field = self._field or (required[0] if len(required) == 1 else None)
        client = GenericEnvClient(base_url=self._url, message_timeout_s=self._timeout)
        self._client = await self._ask(client.connect()) or client

    async def _ask(self, request: Any) -> Any:
        try:
            return await request
        except (ConnectionClosed, OSError, TimeoutError) as error:
            raise EnvironmentLost(f"the OpenEnv server {self._url} does not answer: {error!r}") from error

    def _action(self, text: str) -> dict[str, Any] | None:
        try:
            action = json.loads(text)
        except ValueError:
            action = text
        if isinstance(action, dict):
            return action
        return {self._field: action} if self._field and text else None

    def _text(self, observation: dict[str, Any]) -> str:
        shown = {k: v for k, v in observation.items() if (k in self._show if self._show else k != "metadata")}
        if len(shown) == 1:
            (value,) = shown.values()
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return json.dumps(shown, ensure_ascii=False) if shown else ""


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    return {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
