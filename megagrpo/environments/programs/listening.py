"""The interface on which the agents' address listens."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from megagrpo.engine.http.access import interface_addresses
from megagrpo.environments.programs.agent_options import AGENT, AgentOptions, is_wildcard
from megagrpo.loopback import LOOPBACK_ADDRESS


@dataclass(frozen=True)
class Listening:
    """Where an address listens: `address`, which URLs call `host`, with TLS if there is a context."""

    host: str = LOOPBACK_ADDRESS
    address: str = LOOPBACK_ADDRESS
    context: ssl.SSLContext | None = None

    @property
    def described(self) -> str:
        name = self.address if self.host == self.address else f"{self.host} ({self.address})"
        return f"{name}, {'http' if self.context is None else 'https'}, needs the conversation's key"


def listening(options: AgentOptions) -> Listening:
    """Return where the address of `options` listens on this machine. Raises ValueError with the fix."""
    name, interfaces = options.listen, interface_addresses()
    try:
        address = interfaces.get(name) or socket.gethostbyname(name)
        if is_wildcard(address):
            raise ValueError(f"{AGENT}.listen: {name} is every interface of the machine; name one")
        with socket.socket() as tried:
            tried.bind((address, 0))
    except OSError as error:
        known = ", ".join(f"{one} ({of_one})" for one, of_one in interfaces.items())
        reason = f"cannot listen on {name}: {error.strerror}"
        raise ValueError(f"{AGENT}.listen: {reason}; name an interface of this machine: {known}") from None
    context = None
    if options.certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(options.certificate, options.certificate_key)
        except OSError as error:  # ssl's errors too
            raise ValueError(f"{AGENT}.certificate: cannot be used: {error}; name files in PEM") from None
    return Listening(address if name in interfaces else name, address, context)
