"""Stand-ins for vLLM servers: processes and threads with real sockets that respond to prompts, or misbehave as
configured.

Imports only the standard library, so that a process starts at once.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

ALONE = """
import sys; sys.path[:0] = {paths!r}
from tests.unit.engine import stand_ins
server = stand_ins.StandIn(delay={delay})
print(server.url, flush=True)
import threading; threading.Event().wait()
"""


def ids_for(body: dict, index: int) -> list[int]:
    """The tokens of every stand-in's response to a request, computed from its seed."""
    return [(body["sampling_params"]["seed"] + index + k) % 997 for k in range(4)]


def choices_for(body: dict, version: str = "default", reason: str = "length") -> list[dict]:
    """Choices in the format of vLLM's responses."""
    choices = []
    for index in range(body["sampling_params"]["n"]):
        ids = ids_for(body, index)
        content = [{"token_id": i, "logprob": -0.5} for i in ids]
        spans = [{"version": version, "start": 0, "end": len(ids)}]
        choices.append(
            dict(index=index, token_ids=ids, finish_reason=reason, logprobs={"content": content})
            | dict(weight_versions=spans)
        )
    return choices


class StandIn:
    """A server on its own port. `mode` decides how it handles prompts: it responds, or misbehaves as in `_misbehave`.
    With `ill` it fails health checks. It has weights of `version`. `spoiled` maps a path of a control request to a kind
    of misbehaviour. `asked` contains the bodies of prompts."""

    reason = "length"  # why its responses end

    def __init__(self, mode: str = "answer", delay: float = 0.0, version: str = "default", port: int = 0):
        self.mode, self.delay, self.version, self.ill, self.asked = mode, delay, version, False, []
        self.headers: dict[str, dict[str, str]] = {}  # of prompts, by request id
        self.spoiled: dict[str, str] = {}
        self.ids: list[int] | None = None  # of streams; None: those of other responses
        self.gates: dict[int, threading.Event] = {}  # place of a token of a stream -> what the token waits for
        self.opened: list[bool] = []  # whether each gate was open within 10 s
        self.breaks: list[int | None] = []  # by stream: the place at which the connection breaks, if it does
        self.aborts: list[int | None] = []  # by stream: the place before which it is aborted, if it is
        stand_in = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                try:
                    stand_in._serve(self.rfile, self.wfile, self.connection)
                except OSError:
                    pass  # the client has disconnected

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address, daemon_threads, request_queue_size = True, True, 1024

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        """Refuse connections from now on."""
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, rfile, wfile, connection) -> None:
        _, path, _ = rfile.readline().decode().split(" ", 2)
        headers = {}
        while (line := rfile.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = json.loads(rfile.read(int(headers.get("content-length", 0))) or b"null")
        if path in self.spoiled:
            return self._break(self.spoiled[path], b'{"world_size": 1}', wfile, connection)
        if path == "/health":
            return _reply(wfile, b"{}", 503 if self.ill else 200)
        if path == "/is_paused":
            return _reply(wfile, b'{"is_paused": false}')
        if path == "/weight_info":
            return _reply(wfile, json.dumps({"weight_version": self.version}).encode())
        if path.startswith("/metrics"):
            return _reply(wfile, b"", kind="text/plain")
        if path == "/get_world_size":
            return _reply(wfile, b'{"world_size": 1}')
        if path.endswith("/derender"):
            return _reply(wfile, json.dumps({"choices": [{"message": {"content": self.url}}]}).encode())
        self.asked.append(body)
        self.headers[body.get("request_id", "")] = headers
        time.sleep(self.delay)
        if body.get("stream"):
            return self._stream(body, wfile, connection)
        text = json.dumps({"choices": choices_for(body, self.version, self.reason)}).encode()
        return _reply(wfile, text) if self.mode == "answer" else self._misbehave(body, text, wfile, connection)

    def _stream(self, body, wfile, connection) -> None:
        """Send a response token by token, as vLLM does."""
        (whole,) = choices_for(body, self.version, self.reason)
        ids = whole["token_ids"] if self.ids is None else self.ids
        breaks, abort = (places.pop(0) if places else None for places in (self.breaks, self.aborts))
        reason, ids = (self.reason, ids) if abort is None else ("abort", ids[:abort])
        wfile.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for place, token_id in enumerate(ids):
            if place == breaks:
                return connection.shutdown(socket.SHUT_RDWR)
            if (gate := self.gates.get(place)) is not None:
                self.opened.append(gate.wait(10))
            content = [{"token_id": token_id, "logprob": -0.5, "rank": 1, "top_logprobs": []}]
            choice = {"index": 0, "token_ids": [token_id], "logprobs": {"content": content}, "finish_reason": None}
            if place == len(ids) - 1:
                spans = [{"version": self.version, "start": 0, "end": len(ids)}]
                choice |= {"finish_reason": reason, "weight_versions": spans}
            _chunk(wfile, b"data: " + json.dumps({"request_id": "0", "choices": [choice]}).encode() + b"\n\n")
        _chunk(wfile, b"data: [DONE]\n\n")
        wfile.write(b"0\r\n\r\n")

    def _break(self, mode, text, wfile, connection) -> bool:
        """Misbehave like a broken connection or proxy, if `mode` is such a kind; return whether it was."""
        if mode == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        elif mode == "drip":
            wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            while True:
                wfile.write(b" ")
                time.sleep(0.05)
        elif mode == "slow":
            wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text))
            for start in range(0, len(text), 1 + len(text) // 10):
                wfile.write(text[start : start + 1 + len(text) // 10])
                time.sleep(0.02)
        elif mode == "half":
            wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text) + text[: len(text) // 2])
        elif mode == "no http":
            wfile.write(b"\x00\x01hello\r\n\r\n")
        elif mode == "raises":
            _reply(wfile, b'{"error": {"message": "Expecting value", "code": 400}}', 400)
        elif mode == "missing":
            _reply(wfile, b'{"detail": "Not Found"}', 404)
        elif mode == "html":
            _reply(wfile, b"<html>proxy</html>", kind="text/html")
        elif mode == "truncated":
            _reply(wfile, text[: len(text) // 2])
        elif mode == "error":
            _reply(wfile, b'{"error": {"message": "out of order"}}', 500)
        elif mode == "gateway":
            _reply(wfile, b"<html>bad gateway</html>", 502, "text/html")
        else:
            return False
        return True

    def _misbehave(self, body, text, wfile, connection) -> None:
        choices = choices_for(body, self.version)
        if not self._break(self.mode, text, wfile, connection):
            first = choices[0]
            changes = {
                "fewer": lambda: choices.pop(),
                "one twice": lambda: choices.append(choices[0]),
                "too long": lambda: first.update(
                    token_ids=[1] * 9, logprobs={"content": [{"token_id": 1, "logprob": -1.0}] * 9}
                ),
                "no log-prob": lambda: first["logprobs"]["content"].pop(),
                "words": lambda: first.update(token_ids=["a", "b"]),
                "wrong version": lambda: [choice["weight_versions"][0].update(version="7") for choice in choices],
            }
            changes[self.mode]()
            _reply(wfile, json.dumps({"choices": choices}).encode())


def _chunk(wfile, data: bytes) -> None:
    wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
    wfile.flush()


def _reply(wfile, body: bytes, status: int = 200, kind: str = "application/json") -> None:
    wfile.write(
        b"HTTP/1.1 %d X\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (status, kind.encode(), len(body)) + body
    )


class Process:
    """A stand-in that responds, in its own process."""

    def __init__(self, delay: float = 0.0):
        code = ALONE.format(paths=[str(Path(__file__).parents[3]), *sys.path], delay=delay)
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()

    def stop(self) -> None:
        """Stop the process with SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue the process with SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with SIGKILL; a second call does nothing."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@contextlib.contextmanager
def noting():
    """Yield the address of a server that accepts every POST, and the list of the paths of these requests."""
    paths = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            paths.append(self.path)
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", paths
        server.shutdown()
