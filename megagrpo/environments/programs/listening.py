"""The interface or the Unix socket on which the agents' address listens."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megagrpo.engine.http.access import interface_addresses
from megagrpo.environments.programs.agent_options import AGENT, UNIX, AgentOptions, is_wildcard
from megagrpo.loopback import LOOPBACK_ADDRESS

FORWARDER = Path(__file__).with_name("forwarder.py")


@dataclass(frozen=True)
class Listening:
    """Where an address listens: `address`, which URLs call `host`, with TLS if there is a context. If `address` is
    UNIX, it is a socket in `folder`."""

    host: str = LOOPBACK_ADDRESS
    address: str = LOOPBACK_ADDRESS
    context: ssl.SSLContext | None = None
    folder: Path | None = None

    @property
    def described(self) -> str:
        if self.address == UNIX:
            return f"a Unix socket in a folder of {tempfile.gettempdir()} with mode 0700, needs the conversation's key"
        name = self.address if self.host == self.address else f"{self.host} ({self.address})"
        return f"{name}, {'http' if self.context is None else 'https'}, needs the conversation's key"


def listening(options: AgentOptions) -> Listening:
    """Return where the address of `options` listens on this machine. Raises ValueError with the fix."""
    name, interfaces = options.listen, interface_addresses()
    if name == UNIX:
        return Listening(UNIX, UNIX)
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


def socket_folder() -> Path:
    """Create a folder for the sockets of addresses, with the forwarder for containers."""
    folder = Path(tempfile.mkdtemp(prefix="megagrpo_policy_"))
    shutil.copyfile(FORWARDER, folder / FORWARDER.name)
    return folder


def unix_socket(folder: Path) -> tuple[Path, socket.socket]:
    """Return a new socket's path in `folder`, and the socket."""
    path, bound = folder / f"{secrets.token_hex(4)}.sock", socket.socket(socket.AF_UNIX)
    handle = os.open(folder, os.O_RDONLY)
    try:
        bound.bind(f"/proc/self/fd/{handle}/{path.name}")  # an address has at most 107 bytes
    finally:
        os.close(handle)
    return path, bound
