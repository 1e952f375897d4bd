"""Removes from the page's text what names a machine or a person: absolute paths, users, hosts, credentials.

Settings, messages and notes lose all of them. Prompts and responses are what the model read and wrote, so they lose
only the folders of this run and of home directories.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from megagrpo.platform.process.variables import ENVIRONMENT

GENERIC = frozenset(("root", "localhost", "127.0.0.1", "0.0.0.0"))  # names that every machine has
# hosts that messages link to
PUBLIC = frozenset(("huggingface.co", "github.com", "arxiv.org", "docs.vllm.ai", "pytorch.org"))
NETWORK = frozenset(("http://", "https://", "ws://", "wss://", "tcp://", "grpc://", "ssh://"))
SHORTEST = 2  # characters of a name
HOME = re.compile(r"(?<![\w.])/(?:home|Users|users)/[^/\s:'\"<>|,;()\[\]{}\\]+|(?<![\w./])/root(?![\w.-])")
PATH = re.compile(r"(?<![\w.…:/<>-])~?(?:/[^\s/:'\"<>|,;()\[\]{}\\]+)+(?<!\.)")
WINDOWS = re.compile(r"(?<!\w)[A-Za-z]:\\(?:[^\s\\:'\"<>|]+\\)+")
URL = re.compile(r"(?<!\w)(\w+://)([^/\s@'\"]+@)?([\w.-]+|\[[0-9a-fA-F:]+\])")
ADDRESS = re.compile(r"\b(?:10|100|169|172|192)\.\d{1,3}\.\d{1,3}\.\d{1,3}\b")
TOKEN = re.compile(
    r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{8,}|(?i:\bbearer\s+)[\w.~+/=-]{16,}"
)
SECRET_KEY = re.compile(r"(?:token|secret|password|credentials?|(?:api|access|private)_?key)$", re.IGNORECASE)


@dataclass(frozen=True)
class Privacy:
    """What one run's page hides: `folders`, some of them `homes`, and `names`. A pattern that hides nothing is None."""

    homes: frozenset[str]
    folders: re.Pattern[str] | None
    names: re.Pattern[str] | None

    def data(self, text: str) -> str:
        """Return a text of a prompt or a response without the run's own folders and home directories."""
        return self._without_folders(text, "") if "/" in text else text

    def text(self, text: str) -> str:
        """Return a setting, message or note without absolute paths, user and host names, addresses and credentials."""
        text = URL.sub(_public, TOKEN.sub("<credential>", text.replace("file:///", "/")))
        text = PATH.sub(_last_parts, WINDOWS.sub("…/", self._without_folders(text, "/{}")))
        text = ADDRESS.sub("<host>", text)
        return self.names.sub("<name>", text) if self.names is not None else text

    def _without_folders(self, text: str, last: str) -> str:
        """Write known folders as "…", and home directories as "~". `last` formats a folder name that ends a path."""

        def shortened(match: re.Match[str]) -> str:
            folder, inside = match[0], match.string.startswith("/", match.end())
            return "~" if folder in self.homes else "…" if inside else "…" + last.format(folder.rpartition("/")[2])

        if self.folders is not None:
            text = self.folders.sub(shortened, text)
        return HOME.sub("~", text)

    def row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a line of `completions.jsonl` or `tokens.jsonl`: notes of rewards as `text`, all else as `data`.

        Tokens that spell a hidden folder are left out.
        """
        clean = {name: _mapped(value, self.text if name == "extra" else self.data) for name, value in row.items()}
        if isinstance(tokens := row.get("tokens"), list):
            spelled = "".join(map(str, tokens))
            if self.data(spelled) != spelled:
                del clean["tokens"]
        return clean

    def notes(self, value: Any) -> Any:
        """Return a JSON value whose texts, not its keys, are `text`."""
        return _mapped(value, self.text)


def privacy_of(folder: Path, config: dict[str, Any], lock: str = "") -> Privacy:
    """Return what the page of this run hides. `lock` is the text of the run's lock, which names its host."""
    texts = list(_texts(config))
    roots = [folder.resolve(), Path(os.path.abspath(folder)), Path.cwd()]
    output = (config.get("run") or {}).get("output_dir") if isinstance(config.get("run"), dict) else None
    if isinstance(output, str) and output.startswith("/"):
        roots.append(Path(os.path.normpath(output)))
    folders = {str(one) for root in roots for one in (root, *root.parents) if len(one.parts) > 2}
    homes = {home.rstrip("/") for home in (os.path.expanduser("~"), ENVIRONMENT.get("HOME", "")) if len(home) > 2}
    homes |= {one for one in folders if HOME.fullmatch(one)}
    hosts = {urlsplit(text).hostname or "" for text in texts if re.match(r"https?://", text)} - PUBLIC
    hosts |= {socket.gethostname(), ENVIRONMENT.get("SLURMD_NODENAME", ""), *re.findall(r"on host (\S+)", lock)}
    named_homes = {match[0] for text in (*texts, *folders) for match in HOME.finditer(text)}
    names = {
        *_users(folder),
        *(PurePosixPath(home).name for home in named_homes if home.count("/") == 2),
        *hosts,
        *(host.partition(".")[0] for host in hosts if not host[:1].isdigit()),
    }
    names = {name for name in names if len(name) >= SHORTEST and not name.isdigit() and name.lower() not in GENERIC}
    return Privacy(
        frozenset(homes),
        _any_of(folders | homes, "(?<![\\w.])", "(?![\\w-])"),
        _any_of(names, "(?<![^\\W_])", "(?![^\\W_])"),
    )


def _any_of(words: Iterable[str], before: str, after: str) -> re.Pattern[str] | None:
    """Return a pattern of these words, the longest first."""
    ordered = sorted(words, key=lambda word: (-len(word), word))
    return re.compile(f"{before}(?:{'|'.join(map(re.escape, ordered))}){after}") if ordered else None


def _last_parts(match: re.Match[str]) -> str:
    """The last two parts of an absolute path, but never all of several."""
    _, *parts = match[0].split("/")
    if len(parts) == 1 or (match[0].startswith("~") and len(parts) == 2):
        return match[0]
    return "/".join(["…", *parts[-2 if len(parts) > 2 else -1 :]])


def _public(match: re.Match[str]) -> str:
    """A URL without its user, and without its host unless everybody knows it. The name of a bucket stays."""
    known = match[3] in PUBLIC or match[3] in GENERIC or match[1] not in NETWORK
    return match[1] + (match[3] if known else "<host>")


def _users(folder: Path) -> set[str]:
    """The names of the user of this process and of the folder's owner."""
    names = {ENVIRONMENT.get("USER", ""), ENVIRONMENT.get("LOGNAME", "")}
    for name in (getpass.getuser, folder.owner):
        try:
            names.add(name())
        except (KeyError, OSError, NotImplementedError):
            continue
    return names


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for below in value.values() if isinstance(value, dict) else value:
            yield from _texts(below)


def _mapped(value: Any, clean: Callable[[str], str]) -> Any:
    """Return a JSON value with each text, but no key, replaced."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {key: _mapped(below, clean) for key, below in value.items()}
    return [_mapped(below, clean) for below in value] if isinstance(value, list) else value
