"""Ports for servers: free ones, and whether a given one can be used."""

from __future__ import annotations

import itertools
import random
import socket

from megagrpo.engine.protocol import EngineStartError

PORTS = range(15_000, 30_000)  # ports of servers when rollout.port is 0


def free_ports(host: str, count: int) -> list[int]:
    """Return ports that nothing listens on now. All are below 32768, from where the kernel assigns ports to outgoing
    connections of other programs, so no such connection takes one before the server listens. Raises EngineStartError
    when fewer than `count` ports are free, or when this machine does not have the address."""
    tried = random.SystemRandom().sample(PORTS, len(PORTS))
    ports = list(itertools.islice((port for port in tried if is_free(host, port)), count))
    if len(ports) < count:
        raise EngineStartError(
            f"rollout.port: {count} free ports needed on {host}, {len(ports)} found ({_bind_error(host, tried[0])})"
        )
    return ports


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on this port now."""
    return _bind_error(host, port) is None


def check_port(host: str, port: int) -> None:
    """Raise EngineStartError when no server could listen on this port now."""
    if error := _bind_error(host, port):
        raise EngineStartError(
            f"rollout.port: {port} cannot be used on {host} ({error.strerror}); name another, or 0 to pick a free one"
        ) from error


def _bind_error(host: str, port: int) -> OSError | None:
    """Try to bind the address. Returns the error, or None when a server could listen there."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            return error
    return None
