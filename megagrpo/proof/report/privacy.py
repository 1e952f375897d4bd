"""Removes credentials and home directories from the page's text.

Settings, messages and notes lose both. Prompts and responses are what the model read and wrote, so they lose only home
directories.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

HOME = re.compile(r"(?<![\w.])/(?:home|Users|users)/[^/\s:'\"<>|,;()\[\]{}\\]+|(?<![\w./])/root(?![\w.-])")
USER = re.compile(r"(?<!\w)(\w+://)[^/\s@'\"]+@")  # of a URL, with a password or not
TOKEN = re.compile(
    r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{8,}|(?i:\bbearer\s+)[\w.~+/=-]{16,}"
)
SECRET_KEY = re.compile(r"(?:token|secret|password|credentials?|(?:api|access|private)_?key)$", re.IGNORECASE)


def without_homes(text: str) -> str:
    """Return a text with home directories written as "~"."""
    return HOME.sub("~", text) if "/" in text else text


def without_secrets(text: str) -> str:
    """Return a setting, message or note without home directories, access tokens and users of URLs."""
    return USER.sub(r"\1", TOKEN.sub("<credential>", without_homes(text)))


def clean_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a line of `completions.jsonl` or `tokens.jsonl` without home directories, and its notes of rewards without
    secrets. Tokens that spell a home directory are left out."""
    clean = {name: mapped(value, without_secrets if name == "extra" else without_homes) for name, value in row.items()}
    if isinstance(tokens := row.get("tokens"), list):
        spelled = "".join(map(str, tokens))
        if without_homes(spelled) != spelled:
            del clean["tokens"]
    return clean


def mapped(value: Any, clean: Callable[[str], str]) -> Any:
    """Return a JSON value with each text, but no key, replaced."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {key: mapped(below, clean) for key, below in value.items()}
    return [mapped(below, clean) for below in value] if isinstance(value, list) else value
