"""A local HTTP server with the hub's routes for uploads and downloads: it keeps repositories, branches and files in
memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test"
COMMIT = "1" * 40


class Hub:
    """`repos` maps OWNER/NAME to its branches, each a map from path to bytes. `private` holds names of private
    repositories."""

    def __init__(self, refuse: dict[str, int] | None = None):
        """`refuse` maps a part of a route to the status code that it responds with."""
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.commits = 0
        self.cards: list[str] = []  # README.md files that the client asked to validate
        self.fetched: list[str] = []  # files that the client downloaded
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = urlsplit(self.path).path
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    return self.answer(401, {"error": "Invalid username or password."})
                for part, status in (refuse or {}).items():
                    if part in path:
                        return self.answer(status, {"error": "not today"})
                self.answer(*hub.respond(path, body))

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                path = path.removeprefix("/api").removeprefix("/models").removeprefix("/datasets")
                owner, name, *route = [*path.strip("/").split("/"), ""][:2] + path.strip("/").split("/")[2:]
                files = hub.repos.get(f"{owner}/{name}", {}).get("main")
                if files is None:
                    self.answer(401, {"error": "Invalid username or password."})  # a client asks after it was refused
                elif route[0] == "revision":
                    self.answer(200, {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": []})
                elif route[0] == "tree":
                    below = "/".join([*route[2:], ""]).lstrip("/")
                    sizes = {file: len(data) for file, data in files.items() if file.startswith(below)}
                    entries = [
                        {"type": "file", "path": file, "size": size, "oid": "2" * 40} for file, size in sizes.items()
                    ]
                    self.answer(200, entries) if sizes else self.answer(
                        404, {"error": "Entry not found"}, "EntryNotFound"
                    )
                elif "/".join(route[2:]) not in files:
                    self.answer(404, {"error": "Entry not found"}, "EntryNotFound")
                else:
                    self.file("/".join(route[2:]), files["/".join(route[2:])])

            do_HEAD = do_GET

            def file(self, name: str, data: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("ETag", f'"{name}"'.replace("/", "-"))
                self.send_header("X-Repo-Commit", COMMIT)
                self.end_headers()
                if self.command == "GET":
                    hub.fetched.append(name)
                    self.wfile.write(data)

            def answer(self, status: int, content: dict | list, code: str = "") -> None:
                text = json.dumps(content).encode()
                self.send_response(status)
                if code:
                    self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", str(len(text)))
                self.send_header("Content-Type", "application/json")
                if "error" in content:
                    self.send_header("X-Error-Message", content["error"])
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def respond(self, path: str, body: bytes) -> tuple[int, dict]:
        """Return (status, content) of one request."""
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            self.cards.append(json.loads(body)["content"])
            return 200, {"warnings": [], "errors": []}
        owner, name, route, revision = path.removeprefix("/api/models/").split("/")
        repo, revision = f"{owner}/{name}", unquote(revision)
        if repo not in self.repos:
            return 404, {"error": "Repository not found"}
        branches = self.repos[repo]
        if route == "branch":
            branches.setdefault(revision, dict(branches["main"]))
            return 200, {}
        if route == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
        assert route == "commit", path
        self.commits += 1
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                assert line["value"]["encoding"] == "base64"
                branches[revision][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1" * 40}

    def _create(self, asked: dict) -> tuple[int, dict]:
        repo = f"{asked['organization'] or 'me'}/{asked['name']}"
        known = repo in self.repos
        self.repos.setdefault(repo, {"main": {}})
        if asked.get("visibility") == "private" and not known:
            self.private.add(repo)
        return (409 if known else 200), {"url": f"{self.url}/{repo}"} | (
            {"error": "You already created this repo"} if known else {}
        )

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def hub(**options: dict[str, int]) -> Iterator[Hub]:
    """Run a Hub for the duration of the block."""
    server = Hub(**options)
    try:
        yield server
    finally:
        server.close()
