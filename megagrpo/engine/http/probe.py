"""Start-up checks of vLLM servers that the user started (`rollout.urls`)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megagrpo.engine.http.access import headers
from megagrpo.engine.http.connections import Answer, ConnectionFailed, ask

RENDER_ROUTE = "v1/chat/completions/render"
BACKEND_FLAG = """--weight-transfer-config '{"backend": "megagrpo"}'"""
VERBS_FLAG = "--worker-extension-cls megagrpo.sync.vllm_side.worker_verbs.WorkerVerbs"
NEEDED_FLAGS = (
    f"{BACKEND_FLAG} {VERBS_FLAG}, with megagrpo installed where it runs and VLLM_SERVER_DEV_MODE=1 in its environment"
)


def check_plugin(urls: Sequence[str], token: str | None = None, quantization: str = "none") -> None:
    """Check that all servers of `rollout.urls` can take this run's weights. Changes nothing on the servers.

    Raises ValueError that names the first server that rejects `token`, whose workers lack the weight transfer plugin,
    or whose quantization is not `quantization`.
    """
    for url in urls:
        answer = _post(url, "init_weight_transfer_engine", {"init_info": {}}, token)
        if answer.status != 200:
            routes = f"has no weight update routes (vLLM 0.25 or later has them); start it with {NEEDED_FLAGS}"
            problems = {401: f"rejected this run's token: {answer.error()}", 404: routes}
            plugin = f"cannot receive weights; start it with {NEEDED_FLAGS}. Response: {_start_of(answer)}"
            raise ValueError(f"rollout.urls: {url} {problems.get(answer.status, plugin)}")
        answer = _post(url, "collective_rpc", {"method": "quantization"}, token)
        if answer.status != 200:
            raise ValueError(f"rollout.urls: {url} lacks {VERBS_FLAG} of this version. Response: {_start_of(answer)}")
        if (its := _first_result(url, answer)) != quantization:
            raise ValueError(
                f"rollout.quantization: {quantization} differs from {url}, which was started with {its}; set it to "
                "that, or start the server with `megagrpo serve` and this config"
            )


def check_tool_parser(urls: Sequence[str], parser: str | None, token: str | None = None) -> None:
    """Check that all servers of `rollout.urls` were started with a tool parser, if the run needs one. vLLM parses a
    turn without one as a turn without calls; only a request to render tools is rejected.

    Raises ValueError that names the first server without a tool parser.
    """
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [{"role": "user", "content": "Look."}], "tools": [tool], "tool_choice": "auto"}
    for url in urls if parser else ():
        answer = _post(url, RENDER_ROUTE, body, token)
        # a server that has a parser may lack a chat template, which is another error
        if answer.status in (401, 403, 404) or (answer.status != 200 and "--tool-call-parser" in answer.text):
            raise ValueError(
                f"multi_turn.tool_parser: {url} does not parse tool calls; start it with --enable-scale-out "
                f"--enable-auto-tool-choice --tool-call-parser {parser}. Response: {_start_of(answer)}"
            )


def _start_of(answer: Answer, length: int = 300) -> str:
    """Return the first characters of a response on one line."""
    return " ".join(answer.text.split())[:length]


def _post(url: str, route: str, body: dict[str, object], token: str | None) -> Answer:
    """Send a POST request and return the response. Raises ValueError when the server does not respond."""
    try:
        return ask(url.rstrip("/"), f"/{route}", body, headers=headers(token), seconds=60)
    except (ConnectionFailed, TimeoutError) as error:
        raise ValueError(f"rollout.urls: {url} does not respond: {error!r}; start it, or name another") from error


def _first_result(url: str, answer: Answer) -> object:
    """Return the first worker's result in a response. Raises ValueError if it is not vLLM's, such as a web page."""
    try:
        return json.loads(answer.content)["results"][0]
    except (ValueError, LookupError, TypeError):
        raise ValueError(
            f"rollout.urls: {url} is not a vLLM server (response: {_start_of(answer, 100)!r}); name the address of a "
            "vLLM server"
        ) from None
