"""Writes the page: one HTML file that loads nothing.

All text of the run is in base64, so no text can end a script or open a tag, and the code of the page inserts it with
`textContent`. The content security policy allows only the scripts and styles of this file, by their hashes, and no
connection.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from functools import cache
from pathlib import Path

from megagrpo.platform.process.atomic_file import write_atomically
from megagrpo.proof.report.payload import Payload

STATIC = Path(__file__).with_name("static")
SCRIPTS = (
    "uPlot.iife.min.js",
    "base.js",
    "charts.js",
    "plots.js",
    "overview.js",
    "tokens.js",
    "conversations.js",
    "responses.js",
    "details.js",
    "main.js",
)
STYLES = ("uPlot.min.css", "page.css")


def render(data: Payload) -> str:
    """Return the HTML of a page."""
    head = base64.b64encode(gzip.compress(data.head.encode(), 9, mtime=0)).decode()
    chunks = "\n".join(
        f'<script type="text/plain" id="chunk-{name}">{text}</script>' for name, text in data.chunks.items()
    )
    return (
        template()
        .replace("{{policy}}", policy())
        .replace("{{licence}}", joined(("uPlot.LICENSE",)))
        .replace("{{style}}", joined(STYLES))
        .replace("{{script}}", joined(SCRIPTS))
        .replace("{{head}}", head)
        .replace("{{chunks}}", chunks)
    )


def write(html: str, path: Path) -> None:
    """Write the page under its final name once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, html)


def static_bytes() -> int:
    """Return the bytes of a page without data."""
    return len(template().encode()) + sum(len(joined(names).encode()) for names in (SCRIPTS, STYLES))


def policy() -> str:
    """Return the content security policy: nothing but this file's script and style."""
    hashes = [hashlib.sha256(joined(names).encode()).digest() for names in (SCRIPTS, STYLES)]
    script, style = (f"'sha256-{base64.b64encode(value).decode()}'" for value in hashes)
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src data:; base-uri 'none'; form-action "
        "'none'"
    )


@cache
def template() -> str:
    """Return the page without data, script and style."""
    return (STATIC / "page.html").read_text(encoding="utf-8")


@cache
def joined(names: tuple[str, ...]) -> str:
    """Return the contents of static files, one after the other."""
    return "\n".join((STATIC / name).read_text(encoding="utf-8").strip() for name in names)
