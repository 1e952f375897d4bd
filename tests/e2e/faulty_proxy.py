"""A proxy in front of a server that makes single requests fail."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading

RESET_AT_CLOSE = b"\1\0\0\0\0\0\0\0"
ANSWER = b"HTTP/1.1 %s\r\ncontent-type: text/html\r\ncontent-length: 18\r\n\r\n<html>proxy</html>"


class FaultyProxy:
    """Forwards connections of one request each to this port of the machine. `faults` maps a path to the fault of its
    next request: `reset` drops the connection, `lost` drops it when the response arrives, `html` and `gateway` respond
    here. A context manager."""

    def __init__(self, port: int):
        self.faults: dict[str, str] = {}
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    proxy._pass_on(self.request, port)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads, request_queue_size = True, 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _pass_on(self, client: socket.socket, port: int) -> None:
        head = client.recv(65536)
        path = head.split(b" ", 2)[1].decode().partition("?")[0]
        fault = self.faults.pop(path, None)
        if fault == "html":
            client.sendall(ANSWER % b"200 OK")
        elif fault == "gateway":
            client.sendall(ANSWER % b"502 Bad Gateway")
        elif fault == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            client.close()
        else:
            with socket.create_connection(("127.0.0.1", port)) as server:
                server.sendall(head)
                threading.Thread(target=_pump, args=(client, server), daemon=True).start()
                if fault == "lost":
                    server.recv(1)
                    # wakes the other thread, which keeps the connection open otherwise
                    client.shutdown(socket.SHUT_RDWR)
                else:
                    _pump(server, client)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Forward bytes until one side closes."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
