"""Token authentication for vLLM servers. vLLM's `--api-key` leaves weight update and developer routes unprotected.

A process gets its token from a file that only its owner can read, or from the environment. Command lines and the
resolved config never hold a token, because other users can read them.
"""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import psutil

from megagrpo.platform.process.access_token import read_token
from megagrpo.platform.process.variables import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE

GUARD = "megagrpo.engine.http.access.TokenGuard"  # for vLLM's --middleware
OPEN_ROUTE = "/health"
REFUSAL = (
    "this server requires its token: set rollout.token_file to the file that holds it, or set the environment variable "
    f"{TOKEN_VARIABLE}"
)


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
