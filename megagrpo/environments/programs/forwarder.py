"""Runs an agent in a container without a network: `python3 forwarder.py SOCKET COMMAND...`.

It listens on the container's loopback, passes each connection on to the Unix socket of the agents' address, and ends
with the command. A container has only this file, so it needs no more than Python 3.6.
"""

import os
import socket
import subprocess
import sys
import threading

_HOST = "127.0.0.1"


def connected(address: str) -> socket.socket:
    """Return a connection to a Unix socket, whose path may have more than the 107 bytes of an address."""
    folder, peer = os.open(os.path.dirname(address), os.O_RDONLY), socket.socket(socket.AF_UNIX)
    try:
        peer.connect(f"/proc/self/fd/{folder}/{os.path.basename(address)}")
    finally:
        os.close(folder)
    return peer


def pass_on(source: socket.socket, target: socket.socket) -> None:
    """Send what comes from `source` to `target`, and its end."""
    try:
        data = source.recv(1 << 16)
        while data:
            target.sendall(data)
            data = source.recv(1 << 16)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def serve(client: socket.socket, address: str) -> None:
    """Connect a client with the address until both have ended."""
    with client, connected(address) as peer:
        back = threading.Thread(target=pass_on, args=(peer, client), daemon=True)
        back.start()
        pass_on(client, peer)
        back.join()


def accept(listener: socket.socket, address: str) -> None:
    """Serve each client in a thread."""
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0], address), daemon=True).start()


def main(address: str, *command: str) -> int:
    """Run the command, and return its exit code; 128 plus the signal that killed it."""
    listener = socket.socket()
    listener.bind((_HOST, 0))
    listener.listen(256)
    threading.Thread(target=accept, args=(listener, address), daemon=True).start()
    url = f"http://{_HOST}:{listener.getsockname()[1]}/v1"
    here = {"OPENAI_BASE_URL": url, "NO_PROXY": _HOST, "no_proxy": _HOST}
    try:
        status = subprocess.Popen(command, env={**os.environ, **here}).wait()
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return 127
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
