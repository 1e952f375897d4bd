"""Token authentication for vLLM servers. vLLM's `--api-key` leaves weight update and developer routes unprotected.

A process gets its token from a file that only its owner can read, or from the environment. Command lines and the
resolved config never hold a token, because other users can read them.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import stat
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import psutil

from megagrpo.platform.process.variables import ENVIRONMENT, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, take

GUARD = "megagrpo.engine.access.TokenGuard"  # for vLLM's --middleware
MIN_TOKEN_LENGTH = 16
OPEN_ROUTE = "/health"
REFUSAL = (
    "this server requires its token: set rollout.token_file to the file that holds it, or set the environment variable "
    f"{TOKEN_VARIABLE}"
)


def read_token(file: str | Path | None, key: str = "rollout.token_file") -> str | None:
    """Read the server token, and remove it from the environment so that child processes do not inherit it.

    The first source that exists counts: `file`, the file named by MEGAGRPO_TOKEN_FILE, the variable MEGAGRPO_TOKEN.
    Returns None without any of them. Raises ValueError, beginning with `key`, when the file is unreadable, readable by
    others, or holds no valid token.
    """
    token = take(TOKEN_VARIABLE)
    if file is None and TOKEN_FILE_VARIABLE in ENVIRONMENT:
        file, key = ENVIRONMENT[TOKEN_FILE_VARIABLE], TOKEN_FILE_VARIABLE
    if file is None:
        return None if token is None else _checked(token, TOKEN_VARIABLE)
    try:
        with open(file) as opened:
            if stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o077:
                raise ValueError(f"{key}: {file} is readable by other users; run chmod 600 on it")
            return _checked(opened.read().strip(), f"{key}: {file}")
    except OSError as error:
        raise ValueError(f"{key}: {file} cannot be read: {error.strerror}") from error


def _checked(token: str, what: str) -> str:
    if len(token) < MIN_TOKEN_LENGTH or not (token.isascii() and token.isprintable()) or " " in token:
        rule = f"a token must be one word of {MIN_TOKEN_LENGTH} or more characters"
        raise ValueError(f"{what}: {rule}; `openssl rand -hex 32` generates one")
    return token


def headers(token: str | None) -> dict[str, str]:
    """The HTTP headers that authenticate a request; empty without a token."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def interface_addresses() -> dict[str, str]:
    """Return the first IPv4 address of each network interface of this host that has one."""
    return {
        name: ipv4[0]
        for name, addresses in psutil.net_if_addrs().items()
        if (ipv4 := [address.address for address in addresses if address.family == socket.AF_INET])
    }


def address_of(interface: str) -> str:
    """Return a network interface's IPv4 address. Raises ValueError with the names of all interfaces if it has none."""
    addresses = interface_addresses()
    if interface not in addresses:
        others = f"choose one of {', '.join(addresses)}"
        fix = "as root: ip addr add 127.0.0.1/8 dev lo" if interface == "lo" else others
        raise ValueError(f"rollout.interface: {interface} has no IPv4 address here; {fix}")
    return addresses[interface]


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class TokenGuard:
    """ASGI middleware that answers 401 to requests without the server's token, outside all vLLM routes and middleware.

    It reads the token as `read_token` does, from the environment or the file named there. `/health` needs no token.
    Raises ValueError, so that the server does not start, when there is no token.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]):
        token = read_token(None)
        if token is None:
            raise ValueError(
                f"{GUARD}: no token is set; set {TOKEN_VARIABLE} to it, or {TOKEN_FILE_VARIABLE} to the name of its "
                "file"
            )
        self._app, self._expected = app, headers(token)["Authorization"].encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request, WebSocket connection or lifespan event."""
        if (
            scope["type"] == "lifespan"
            or (scope["type"] == "http" and scope["path"] == OPEN_ROUTE)
            or self._is_authorized(scope)
        ):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            # closed before it is accepted: the client gets 403
            await send({"type": "websocket.close", "code": 1008, "reason": "no token"})
        else:
            body = json.dumps({"error": {"message": REFUSAL, "code": 401}}).encode()
            kind = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": kind})
            await send({"type": "http.response.body", "body": body})

    def _is_authorized(self, scope: Message) -> bool:
        sent = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        return len(sent) == 1 and hmac.compare_digest(sent[0], self._expected)
