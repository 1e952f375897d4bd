"""A client of NeMo-Gym's resources servers (NVIDIA), by their HTTP protocol; the package `nemo-gym` is not needed.

    multi_turn:
      environment: examples/adapters/nemo_gym.py:NemoGym
      environment_args: {name: "http://HOST:PORT"}

A response has a session of the server, known by its cookie:
POST /seed_session with the row begins it, POST /TOOL with the arguments calls a tool, POST /verify with the row and
the conversation, as a response of OpenAI's Responses API, returns the reward. The tools are the other POST routes of
the server's /openapi.json. Protocol: nemo_gym/base_resources_server.py of nemo-gym 0.4.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from megagrpo.environments.episodes.episode import EnvironmentLost

_NOT_TOOLS = ("/seed_session", "/verify", "/aggregate_metrics", "/close_session")


class NemoGym:
    """One session of a resources server. `timeout` is the deadline of a request in seconds."""

    def __init__(self, name: str, timeout: float = 60.0):
        self._url, self._timeout = name.rstrip("/"), timeout
        self._row: dict[str, Any] = {}
        self._http = httpx.Client(base_url=self._url, timeout=timeout)

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the schemas of the server's tools, in OpenAI's format."""
        described = self._request("GET", "/openapi.json").json()
        routes = {path: methods["post"] for path, methods in described["paths"].items() if "post" in methods}
        return [_schema(path, routes[path], described) for path in routes if path not in _NOT_TOOLS]

    def reset(self, prompt: Any = None, **columns: Any) -> None:
        """Begin a session with a row. Without its column `responses_create_params` the row gets one of the prompt."""
        self._http.close()
        self._http = httpx.Client(base_url=self._url, timeout=self._timeout)  # without the last session's cookie
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        self._row = {"responses_create_params": {"input": messages}} | columns
        self._request("POST", "/seed_session", self._row)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool. Returns the text of its answer. Raises RuntimeError for a status that is an error."""
        answer = self._request("POST", f"/{name}", arguments, fails=False)
        if answer.is_error:
            raise RuntimeError(f"HTTP {answer.status_code}: {answer.text[:1000]}")
        return answer.text

    def get_reward(self, messages: list[dict[str, Any]], prompt_messages: int) -> float:
        """Have the server verify the conversation."""
        response = {
            **{"id": "policy", "object": "response", "created_at": 0.0, "model": "policy"},
            **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
        }
        body = self._row | {"response": response | {"output": _output(messages[prompt_messages:])}}
        return float(self._request("POST", "/verify", body).json()["reward"])

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _request(self, method: str, path: str, body: Any = None, fails: bool = True) -> httpx.Response:
        try:
            answer = self._http.request(method, path, json=body)
            return answer.raise_for_status() if fails else answer
        except httpx.HTTPError as error:
            raise EnvironmentLost(f"the NeMo-Gym server {self._url}{path}: {error!r}") from error


def _schema(path: str, route: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a POST route, with the component that its body refers to."""
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    components = described.get("components", {}).get("schemas", {})
    parameters = components.get(body.get("$ref", "").rsplit("/", 1)[-1], body) or {"type": "object", "properties": {}}
    description = route.get("description") or route.get("summary") or ""
    return {"type": "function", "function": {"name": path[1:], "description": description, "parameters": parameters}}


def _output(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as items of a response. Results have the ids of the calls before them, in order."""
    items: list[dict[str, Any]] = []
    open_ids: list[str] = []
    for i, message in enumerate(messages):
        content = message.get("content") or ""
        if message["role"] == "tool":
            call_id = open_ids.pop(0) if open_ids else "none"
            result = {"call_id": call_id, "output": content, "status": "completed"}
            items.append({"type": "function_call_output", "id": f"m{i}"} | result)
        elif message["role"] == "assistant":
            text: dict[str, Any] = {"type": "output_text", "text": content, "annotations": []}
            said = {"type": "message", "id": f"m{i}", "role": "assistant", "status": "completed", "content": [text]}
            calls = [call["function"] for call in message.get("tool_calls") or []]
            open_ids = [f"call_{i}_{j}" for j in range(len(calls))]
            items.append(said)
            for call_id, call in zip(open_ids, calls, strict=True):
                named = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
                items.append({"type": "function_call", "call_id": call_id} | named)
        else:
            items.append({"type": "message", "role": message["role"], "content": content})
    return items
