"""Who may ask a vLLM server: those who know its token. vLLM's own `--api-key` leaves its routes for weights and for developers open.

A token reaches a process by a file that only its owner reads, or by the environment; a command line and a resolved config are for all to
read.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

TOKEN_VARIABLE, FILE_VARIABLE = "MEGAGRPO_TOKEN", "MEGAGRPO_TOKEN_FILE"
GUARD = "megagrpo.engine.access.TokenGuard"  # for vLLM's --middleware
SHORTEST = 16  # characters of a token
SIOCGIFADDR = 0x8915
OPEN_ROUTE = "/health"
REFUSAL = (
    "this server answers those who send its token: name the file that holds it by rollout.token_file, or put it into the environment as "
    f"{TOKEN_VARIABLE}"
)


def read_token(file: str | Path | None, key: str = "rollout.token_file") -> str | None:
    """The token in `file`, else in the file that the environment names, else in the environment, out of which it is taken so that children
    do not inherit it; None where there is none. ValueError that begins with `key` for a file that others may read, and for no token."""
    given = os.environ.pop(TOKEN_VARIABLE, None)
    if file is None and FILE_VARIABLE in os.environ:
        file, key = os.environ[FILE_VARIABLE], FILE_VARIABLE
    if file is None:
        return None if given is None else _checked(given, TOKEN_VARIABLE)
    try:
        with open(file) as opened:
            if stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o077:
                raise ValueError(f"{key}: others than its owner may open {file}; chmod 600 it")
            return _checked(opened.read().strip(), f"{key}: {file}")
    except OSError as error:
        raise ValueError(f"{key}: {file} cannot be read: {error.strerror}") from error


def _checked(token: str, what: str) -> str:
    if len(token) < SHORTEST or not (token.isascii() and token.isprintable()) or " " in token:
        raise ValueError(f"{what}: a token is one word of {SHORTEST} or more characters; `openssl rand -hex 32` makes one")
    return token


def headers(token: str | None) -> dict[str, str]:
    """What a request says to be let in."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface. ValueError names those there are when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            told = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            known = ", ".join(sorted(name for _, name in socket.if_nameindex()))
            raise ValueError(f"rollout.interface: {interface} has no IPv4 address here ({error.strerror}); there are {known}") from error
    return socket.inet_ntoa(told[20:24])


Message = MutableMapping[str, Any]
Receive, Send = Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]


class TokenGuard:
    """ASGI middleware around all of vLLM's routes, those of other middleware too: 401 for whoever does not send the token that the server
    found in its environment or in the file named there. `/health` stays open. A server without a token does not start."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]):
        token = read_token(None)
        if token is None:
            raise ValueError(f"{GUARD}: there is no token; put one into {TOKEN_VARIABLE}, or the name of its file into {FILE_VARIABLE}")
        self._app, self._expected = app, headers(token)["Authorization"].encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request, connection or event of the server."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] == OPEN_ROUTE) or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no token"})  # before it is accepted: answered with 403
        else:
            body = json.dumps({"error": {"message": REFUSAL, "code": 401}}).encode()
            kind = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": kind})
            await send({"type": "http.response.body", "body": body})

    def _knows(self, scope: Message) -> bool:
        told = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        return len(told) == 1 and hmac.compare_digest(told[0], self._expected)
